"""Recommendations from Python, from a file of histories, and over HTTP, with their latencies."""
