"""Packed sequences: segments, reverse scan, token selection, importance ratio. Imports no other room."""
