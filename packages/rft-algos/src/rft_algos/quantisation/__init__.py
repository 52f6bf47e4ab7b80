"""Vectors as a few codes: k-means, balanced k-means, residual quantisation, optimal transport. Imports no other room."""
