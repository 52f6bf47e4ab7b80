"""Decoders made from nothing: their sizes, their first weights, and the directory that training starts from."""
