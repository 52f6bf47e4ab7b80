"""Rewards of recommended items: a group of responses against the item that was taken. May import `baselines`."""
