"""Pages of pre-training."""
