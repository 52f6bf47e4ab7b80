"""Advantages of groups that are enumerated and not drawn, such as the beams of a search.

The mean over a drawn group estimates an expectation under the policy; the mean over the best sequences does not: each
stands for its own probability. As in `group_relative`: [N] rewards and [N] group ids in, [N] float64 without gradient
out, and exactly 0 in groups of equal rewards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.advantages.group_statistics import group_size, group_sum, grouped
from rft_algos.input_checks import refuse


def probability_weighted(rewards_N: Tensor, group_ids_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """Advantage of each sequence, weighted by its probability within its group.

    With w_i = p_i / sum_j p_j over the G distinct sequences of the group,

        A_i = G w_i (R_i - sum_j w_j R_j).

    The mean over the group of A_i grad log p_i is then the gradient of sum_i w_i R_i, the expected reward of a policy
    that draws among these sequences alone: sum_i w_i (R_i - sum_j w_j R_j) grad log p_i, since
    grad w_i = w_i (grad log p_i - sum_j w_j grad log p_j).

    Args:
        rewards_N: [N] rewards.
        group_ids_N: [N] int64, the group of each sequence; the sequences of a group are distinct.
        logprobs_N: [N] log-prob of each whole sequence, in nats.

    Returns:
        [N] float64, no gradient; those of a group add up to 0. Example: rewards 1, 0 with probabilities 0.6 and 0.2
        have the weights 3/4 and 1/4 and give 2 (3/4) (1/4) = 3/8 and -3/8.
    """
    rewards_N, groups_N = grouped(rewards_N, group_ids_N)
    if logprobs_N.shape != rewards_N.shape:
        refuse(f"{rewards_N.shape} rewards for {logprobs_N.shape} log-probs")
    logprobs_N = logprobs_N.detach().to(torch.float64)
    # against the likeliest of the group: long sequences have probabilities below the smallest number
    largest_G = logprobs_N.new_full((len(rewards_N),), -torch.inf).scatter_reduce(0, groups_N, logprobs_N, "amax")
    shares_N = (logprobs_N - largest_G[groups_N]).exp()
    weights_N = shares_N / group_sum(shares_N, groups_N)
    # rewards against one of the group: where all are equal every difference is exactly 0
    smallest_G = rewards_N.new_full((len(rewards_N),), torch.inf).scatter_reduce(0, groups_N, rewards_N, "amin")
    above_N = rewards_N - smallest_G[groups_N]
    return group_size(groups_N) * weights_N * (above_N - group_sum(weights_N * above_N, groups_N))
