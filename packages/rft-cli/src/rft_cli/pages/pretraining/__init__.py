"""Pages about training a language model on texts."""
