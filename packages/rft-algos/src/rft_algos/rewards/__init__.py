"""Rewards before advantages: KL penalty, shaping, group filtering. May import `advantages`, `losses` and `packed`."""
