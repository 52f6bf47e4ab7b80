"""Surrogates: what the policy minimises, token by token. Each gives an unreduced loss [T].

log_ratio_T = log pi(token) - log pi_old(token). Reduction is the caller's (`rft_algos.losses.aggregation`).
Where a surrogate compares whole sequences, its value stands at each token of the sequence, so that
`sequence_mean_token_mean` gives the published loss.

A function named `..._clipped` tells where the clip of its surrogate acted, `..._kept` which tokens
a mask let through.

Each module joins its equations to their components (`rft_algos.algorithms.registry`). All modules here are imported, so
that a new one needs no line in this file.
"""

import importlib
import pkgutil

from rft_algos.packed.importance_ratio import LOG_RATIO_LIMIT, is_clamped, ratio
from rft_algos.surrogates.cispo import cispo, cispo_clipped
from rft_algos.surrogates.clip_cov import (
    clip_cov,
    clip_cov_clipped,
    kl_cov,
    select_clip_cov,
    select_kl_cov,
    token_covariances,
)
from rft_algos.surrogates.cpgd import cpgd, cpgd_clipped, policy_drift
from rft_algos.surrogates.dppo import dppo_kl, dppo_kl_kept, dppo_top_k, dppo_tv, dppo_tv_kept, top_k_divergence
from rft_algos.surrogates.gmpo import gmpo, gmpo_clipped
from rft_algos.surrogates.gspo import gspo, gspo_clipped, gspo_token, gspo_token_clipped
from rft_algos.surrogates.ppo import dual_clip, dual_clipped, ppo_clip, ppo_clipped, two_sided, two_sided_clipped
from rft_algos.surrogates.proximal import decoupled_ppo, dro, dro_sequence, squared_log_ratio
from rft_algos.surrogates.reinforce import importance_weighted, reinforce
from rft_algos.surrogates.sapo import sapo
from rft_algos.surrogates.vespo import topr, vespo

__all__ = [
    "LOG_RATIO_LIMIT",
    "cispo",
    "cispo_clipped",
    "clip_cov",
    "clip_cov_clipped",
    "cpgd",
    "cpgd_clipped",
    "decoupled_ppo",
    "dppo_kl",
    "dppo_kl_kept",
    "dppo_top_k",
    "dppo_tv",
    "dppo_tv_kept",
    "dro",
    "dro_sequence",
    "dual_clip",
    "dual_clipped",
    "gmpo",
    "gmpo_clipped",
    "gspo",
    "gspo_clipped",
    "gspo_token",
    "gspo_token_clipped",
    "importance_weighted",
    "is_clamped",
    "kl_cov",
    "policy_drift",
    "ppo_clip",
    "ppo_clipped",
    "ratio",
    "reinforce",
    "sapo",
    "select_clip_cov",
    "select_kl_cov",
    "squared_log_ratio",
    "token_covariances",
    "top_k_divergence",
    "topr",
    "two_sided",
    "two_sided_clipped",
    "vespo",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
