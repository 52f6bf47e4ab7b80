"""Scalar heads on a decoder. May import `backbone` and `loading`."""
