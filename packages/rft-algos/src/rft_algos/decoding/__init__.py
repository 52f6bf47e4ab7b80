"""Search and sampling over next-token distributions: truncation, beam search, token trie. Imports no other room."""
