"""LightRFT's Python names on the same loop. May import every other room; no room imports it."""
