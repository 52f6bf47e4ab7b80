"""Loops of one's own: policy, trainer and batches of the built-in loops. May import `build`, `parallel`, `process`."""
