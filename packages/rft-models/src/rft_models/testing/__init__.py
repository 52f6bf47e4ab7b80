"""Counters for tests and benchmarks. Imports no other room."""
