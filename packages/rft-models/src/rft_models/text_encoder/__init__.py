"""Texts as vectors: any backbone of transformers with pooled states. May import `loading` and `tokenization`."""
