"""Parallel strategies: how one model is distributed over the ranks, each with the same optimizer step."""
