"""rft-train: one command for supervised and reinforcement fine-tuning of language models."""

__version__ = "0.1.0"
