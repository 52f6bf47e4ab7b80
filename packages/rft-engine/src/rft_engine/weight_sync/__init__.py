"""Weights on their way to an engine: fingerprints, shared memory, log-prob probe. Imports no other room."""
