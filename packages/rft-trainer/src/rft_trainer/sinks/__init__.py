"""Where the records of a run go: the run directory always, trackers where they are asked for."""
