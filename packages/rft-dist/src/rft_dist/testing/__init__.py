"""Ranks as threads and processes, for tests."""
