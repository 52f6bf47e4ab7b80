"""Rollouts ahead of the trainer, with bounded staleness. May import `rollouts` and `batches`."""
