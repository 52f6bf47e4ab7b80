"""Settings of the commands; no torch."""
