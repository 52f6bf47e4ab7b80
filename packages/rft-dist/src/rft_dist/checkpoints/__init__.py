"""Durable checkpoints: staged, hashed, published by one rename, read back, and only then counted."""

__version__ = "0.1.0"
