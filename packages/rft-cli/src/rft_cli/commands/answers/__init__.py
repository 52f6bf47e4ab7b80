"""`rft-train rollouts`: the sampled answers of a run. May import `runs` beside it."""
