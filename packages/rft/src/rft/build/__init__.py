"""Settings to the parts of a run, one part a module. May import `process` and `checkpoints`."""
