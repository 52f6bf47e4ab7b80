"""Rewards: what a response is worth, by name or from a file of the user's own."""
