"""One step of a run on tensors without values, for what it holds at its peak. May import the rest of `planning`."""
