"""Triton kernels of RFT, each beside a torch reference of the same signature; the entry is `rft_kernels.ops`."""

__version__ = "0.1.0"
