"""Vectors as a few codes: k-means, balanced k-means, residual quantisation, transport. Imports no other room."""
