"""Builders of a run's parts from settings, one part a module. May import `process` and `checkpoints`."""
