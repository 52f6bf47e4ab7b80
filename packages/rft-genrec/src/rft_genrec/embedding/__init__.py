"""Texts of items as vectors: encoders, and the files of vectors with what they were made of."""
