"""Plumbing that every package of RFT needs: errors, keyed randomness, JSON records, durable files."""

__version__ = "0.1.0"
