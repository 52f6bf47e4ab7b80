"""Settings of the calls of `rft` as typed keyword arguments."""
