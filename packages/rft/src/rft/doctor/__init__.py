"""Examination of an installation and a machine: a verdict for each fact, and what mends it. Starts no run."""
