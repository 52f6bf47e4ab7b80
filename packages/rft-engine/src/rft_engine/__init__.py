"""Inference engines for RFT: the in-process engine, sampling, scheduling, weight versions."""

__version__ = "0.1.0"
