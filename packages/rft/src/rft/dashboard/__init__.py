"""Runs in a browser while they go on: a server of this machine that reads the directories of runs, and nothing else."""
