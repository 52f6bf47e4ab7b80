"""Sinks of a run's records: the run directory always, trackers on request."""
