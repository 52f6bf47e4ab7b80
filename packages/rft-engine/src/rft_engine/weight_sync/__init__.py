"""Weights on their way to an engine: fingerprints, shared memory, log-prob probe. May import `process`."""
