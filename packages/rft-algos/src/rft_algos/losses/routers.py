"""Routers of mixtures of experts: the penalty on their logits, balance by a bias, and measures of their loads.

A load c_i is the number of rows (a token in a layer) that go to expert i; E experts, k of them for each row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rft_algos.input_checks import check_not_negative

DEAD_SHARE = 0.05
"""An expert with less of the mean load than this is counted as dead."""


def router_z_loss(log_normaliser_N: Tensor) -> Tensor:
    """l_n = (log sum_i exp(x_ni))^2 of a row's router logits x: they stay small, where rounding is fine.

    Source: Zoph et al. 2022, "ST-MoE" (arXiv 2202.08906), equation 5, whose mean over the rows has the weight 1e-3.

    Args:
        log_normaliser_N: [N] log sum_i exp(x_ni) of each row; the gradient flows through it.

    Returns:
        [N] loss of each row.
    """
    return log_normaliser_N.square()


def balanced_bias(bias_LE: Tensor, loads_LE: Tensor, rate: float) -> Tensor:
    """b_i + u (sign(mean c - c_i) - mean_j sign(mean c - c_j)): raised where an expert has little to do.

    The bias is added to the scores that experts are chosen by, and not to those that weigh what they give, so that
    no gradient is disturbed. Its mean over the experts stays what it is.

    Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing" (arXiv 2408.15664), algorithm 1, u = 1e-3;
    subtracting the mean is torchtitan's.

    Args:
        bias_LE: [L, E] the bias of each expert of each layer.
        loads_LE: [L, E] loads of one optimizer step.
        rate: u, not negative.

    Returns:
        [L, E] the bias of the next step, in the type of `bias_LE`.
    """
    check_not_negative(rate=rate)
    signs_LE = torch.sign(loads_LE.mean(-1, keepdim=True) - loads_LE)
    step_LE = signs_LE - signs_LE.mean(-1, keepdim=True)
    return bias_LE + rate * step_LE.to(bias_LE.dtype)


def max_violation(loads_LE: Tensor) -> Tensor:
    """MaxVio = max_i c_i / mean c - 1: 0 where experts are used alike, E / k - 1 where k experts have all rows.

    Source: Wang et al. 2024 (arXiv 2408.15664), section 4.1.

    Args:
        loads_LE: [L, E] loads of each layer, not all of them 0.

    Returns:
        [L] the measure of each layer.
    """
    return loads_LE.amax(-1) / loads_LE.mean(-1) - 1


def load_entropy(loads_LE: Tensor) -> Tensor:
    """H(f) / log E with f_i = c_i / sum c: 1 where experts are used alike, 0 where one has all rows.

    Args:
        loads_LE: [L, E] loads of each layer, not all of them 0; E is 2 or more.

    Returns:
        [L] the measure of each layer.
    """
    shares_LE = loads_LE / loads_LE.sum(-1, keepdim=True)
    return -torch.xlogy(shares_LE, shares_LE).sum(-1) / math.log(loads_LE.shape[-1])


def dead_experts(loads_LE: Tensor) -> Tensor:
    """Mark the experts with c_i < 0.05 mean c.

    Args:
        loads_LE: [L, E] loads of each layer.

    Returns:
        [L, E] bool.
    """
    return loads_LE < DEAD_SHARE * loads_LE.mean(-1, keepdim=True)
