"""Preflight: checks and comparisons of the ranks before a model loads. May import `launch` and `planning`."""
