"""Pairs of responses and labelled responses as rows have them. May import the rest of `data`."""
