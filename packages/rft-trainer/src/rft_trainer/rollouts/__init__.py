"""Sampling and scoring of rollouts, single-turn and multi-turn. May import `scoring`, `batches` and `environments`."""
