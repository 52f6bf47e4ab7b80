"""Tokenised samples of large data on disk, read through memory maps; it may import `data.readers` and `records`."""
