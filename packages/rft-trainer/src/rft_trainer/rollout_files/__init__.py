"""Rollouts of a run as data: records of tokens, selections of readable rows, exports. May import `runs`, `scoring`."""
