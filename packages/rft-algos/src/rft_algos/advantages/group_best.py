"""Advantages of sequences when what counts is the best of several, not their mean.

As in `group_relative`: [N] rewards and [N] group ids in, [N] float64 without gradient out, and
exactly 0 in groups of equal rewards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.advantages.group_statistics import group_size, group_std, group_sum, grouped, ratio_or_zero
from rft_algos.input_checks import check_not_negative, refuse


def pass_at_k(rewards_N: Tensor, group_ids_N: Tensor, *, k: int) -> Tensor:
    """Analytic advantage of pass@k training, for rewards of 0 and 1.

    Draw k of the G sequences of a group; the draw is rewarded if any of them is correct. With n wrong
    sequences, over all draws,

        R = 1 - C(n, k) / C(G, k),   sigma = sqrt(R (1 - R)),
        A_correct = (1 - R) / sigma,   A_wrong = (1 - R - C(n - 1, k - 1) / C(G - 1, k - 1)) / sigma,

    which are the normalised rewards of the draws, averaged over those that hold the sequence. 0 where
    sigma is 0: all right, fewer than k wrong, or all wrong. A group of at most k sequences has one
    draw or none and gets 0. For k = 1 it is GRPO's advantage without Bessel's correction.

    Source: Chen et al. 2025, "Pass@k training" (arXiv 2508.10751), analytical derivation.

    Args:
        rewards_N: [N] rewards, each 0 or 1.
        group_ids_N: [N] int64, the group of each sequence.
        k: how many sequences are drawn, at least 1.

    Returns:
        [N] float64, no gradient; the advantages of a group add up to 0. Example: rewards 1, 0, 0, 0
        with k = 2 have 1 - R = 1/2 and sigma = 1/2 and give 1, -1/3, -1/3, -1/3.
    """
    if not k >= 1:
        refuse(f"k must be at least 1: {k}")
    rewards_N, groups_N = grouped(rewards_N, group_ids_N)
    if not bool(((rewards_N == 0) | (rewards_N == 1)).all()):
        refuse("pass_at_k needs rewards of 0 and 1")
    sizes_N = group_size(groups_N)
    wrong_N = sizes_N - group_sum(rewards_N, groups_N)

    # C(n - 1, k - 1) / C(G - 1, k - 1) = product over j = 1..k-1 of (n - j) / (G - j)
    drawn_K = torch.arange(1, k, device=rewards_N.device)
    others_wrong_N = ((wrong_N[:, None] - drawn_K) / (sizes_N[:, None] - drawn_K)).prod(dim=1)
    # C(n, k) / C(G, k) is the product above times n / G
    all_wrong_N = wrong_N / sizes_N * others_wrong_N
    sigma_N = (all_wrong_N * (1 - all_wrong_N)).sqrt()
    advantages_N = torch.where(rewards_N == 1, all_wrong_N, all_wrong_N - others_wrong_N)
    # groups of at most k sequences may have divided by 0 above
    return torch.where((sizes_N > k) & (sigma_N > 0), advantages_N / sigma_N, 0.0)


def best_of_group(rewards_N: Tensor, group_ids_N: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """The best sequence of a group gets its lead over the second best, all others 0.

    A_best = (R_best - R_second) / (std_g R + epsilon), with Bessel's correction.

    R_best - R_second is what the maximum over the group would lose without its best sequence: the
    leave-one-out baseline for the maximum, as `leave_one_out` is for the mean. Two best ones
    replace each other, so both get 0.

    Source: Tang et al. 2025, "Optimizing language models for inference time objectives" (arXiv
    2503.19595); the division by the spread is that of group-relative training.

    Args:
        rewards_N: [N] finite rewards.
        group_ids_N: [N] int64, the group of each sequence.
        epsilon: added to the standard deviation, in the unit of the rewards.

    Returns:
        [N] float64, no gradient. Example: rewards 3, 1, 1, -1 have std sqrt(8/3) and give
        2 / sqrt(8/3), 0, 0, 0.
    """
    check_not_negative(epsilon=epsilon)
    rewards_N, groups_N = grouped(rewards_N, group_ids_N)
    best_N = _group_max(rewards_N, groups_N)
    is_best_N = rewards_N == best_N
    is_alone_N = group_sum(is_best_N.to(torch.float64), groups_N) == 1
    second_N = _group_max(torch.where(is_best_N, -torch.inf, rewards_N), groups_N)
    # -inf is the second of a group whose rewards are all equal, or of one
    has_lead_N = is_best_N & is_alone_N & second_N.isfinite()
    lead_N = torch.where(has_lead_N, best_N - second_N, 0.0)
    return ratio_or_zero(lead_N, group_std(rewards_N, groups_N) + epsilon)


def _group_max(values_N: Tensor, groups_N: Tensor) -> Tensor:
    maxima_N = torch.full_like(values_N, -torch.inf).scatter_reduce_(0, groups_N, values_N, "amax")
    return maxima_N[groups_N]
