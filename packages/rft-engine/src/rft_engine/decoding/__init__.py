"""Sampling of one token a row, trie constraints, beam search. Imports no other room."""
