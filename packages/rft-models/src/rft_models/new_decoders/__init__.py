"""Decoders made from nothing: sizes, first weights and directory. May import `files` and `tokenization`."""
