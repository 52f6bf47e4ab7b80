"""The equations of reinforcement fine-tuning: advantages, surrogates, KL estimators, reductions, sampling. Needs torch alone."""

__version__ = "0.1.0"
