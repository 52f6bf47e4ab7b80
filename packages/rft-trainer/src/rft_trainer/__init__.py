"""A reinforcement fine-tuning run: data, rollouts, rewards, loops, evaluation, the run directory."""

__version__ = "0.1.0"
