"""Rollouts that are drawn while the trainer trains."""
