"""The equations of reinforcement fine-tuning, with torch alone: import the modules, such as `rft_algos.objectives`."""

__version__ = "0.1.0"
