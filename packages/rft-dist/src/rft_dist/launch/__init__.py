"""How a process becomes a rank: environment, SLURM, spawn, rendezvous, process group. May import `health`."""
