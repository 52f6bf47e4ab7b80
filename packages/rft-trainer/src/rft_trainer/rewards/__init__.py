"""Reward functions: built-in ones by name, and those from a user's file."""
