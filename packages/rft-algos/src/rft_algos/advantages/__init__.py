"""Advantages: how much better than expected a sequence, a turn or a token was."""

from rft_algos.advantages.gae import bootstrap_truncated, decoupled_gae, gae, length_adaptive_lambda
from rft_algos.advantages.group_best import best_of_group, pass_at_k
from rft_algos.advantages.group_relative import (
    batch_std,
    cpgd,
    gdpo,
    gpg,
    group_centred,
    group_norm,
    leave_one_out,
    max_rl,
    opo,
    remax,
)
from rft_algos.advantages.process_rewards import process_group_norm, turn_level
from rft_algos.advantages.returns import discounted_returns, reinforce
from rft_algos.advantages.token_baseline import optimal_token_baseline
from rft_algos.advantages.whitening import Moments, clip, moments, whiten

__all__ = [
    "Moments",
    "batch_std",
    "best_of_group",
    "bootstrap_truncated",
    "clip",
    "cpgd",
    "decoupled_gae",
    "discounted_returns",
    "gae",
    "gdpo",
    "gpg",
    "group_centred",
    "group_norm",
    "leave_one_out",
    "length_adaptive_lambda",
    "max_rl",
    "moments",
    "opo",
    "optimal_token_baseline",
    "pass_at_k",
    "process_group_norm",
    "reinforce",
    "remax",
    "turn_level",
    "whiten",
]
