"""The run directory, its reader, checkpointing, reports, stop signals. May import `rollouts` and `metrics`."""
