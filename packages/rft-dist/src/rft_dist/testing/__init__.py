"""Ranks as threads and processes, and byte counters, for tests."""
