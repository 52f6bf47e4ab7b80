"""Held-out evaluation and the training-inference mismatch. May import `rollouts` and `metrics`."""
