"""The library behind `rft-train`: from settings to a run. Reads no argv, prints nothing, holds no equation."""

__version__ = "0.1.0"
