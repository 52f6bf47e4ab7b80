"""Tokens of large data on disk, built in workers, read through memory maps; may import `data.readers` and `records`."""
