"""The report on one run: a single page of HTML that needs no network. Reads the run's directory and nothing else."""
