"""Triton kernels; the only place that imports triton. Each equals a function of `reference`."""
