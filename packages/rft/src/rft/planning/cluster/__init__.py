"""Cost of one step of reinforcement learning on a cluster, by formula. May import the rest of `planning`."""
