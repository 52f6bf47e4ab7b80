"""Detectors of what goes wrong with a training run, as pure functions over its rows of metrics. May import `runs`."""
