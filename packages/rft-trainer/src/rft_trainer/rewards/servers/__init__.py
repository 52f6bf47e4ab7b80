"""Rewards behind HTTP: requests with one deadline, the wait for a server that is away, and what may be asked."""
