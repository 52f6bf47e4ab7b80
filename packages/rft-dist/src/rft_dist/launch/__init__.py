"""Launch of a process as a rank: environment, SLURM, spawn, rendezvous, process group. May import `health`."""
