"""Ranks for RFT: process groups, collectives, sharded optimizers, checkpoints that survive a kill."""

__version__ = "0.1.0"
