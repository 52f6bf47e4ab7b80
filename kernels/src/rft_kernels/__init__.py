"""Triton kernels of RFT, each beside a torch reference of the same signature."""

__version__ = "0.1.0"
