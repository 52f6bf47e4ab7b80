"""Profile of some steps of a run: recorded, summed up, and written into the run directory. May import torch."""
