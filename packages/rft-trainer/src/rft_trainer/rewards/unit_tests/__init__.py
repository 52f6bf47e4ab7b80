"""Reward `code`: programs of responses on unit tests, in sandboxes. May import `sandbox`, and `rules` beside it."""
