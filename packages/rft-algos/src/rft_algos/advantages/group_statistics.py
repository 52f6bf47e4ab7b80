"""Sums, means and spreads over the sequences of a group, such as all that were sampled for one prompt.

Groups may differ in size and their sequences may stand in any order. Results of a group are
given back at each of its sequences, so that no function needs to know how many groups there are
and no device is asked. Everything is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.input_checks import refuse
from rft_algos.packed.tensor_checks import check_group_ids


def grouped(rewards_N: Tensor, group_ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards and groups in the form that this module computes with, checked.

    Args:
        rewards_N: [N] finite rewards, any floating or integer type.
        group_ids_N: [N] int64, equal for the sequences of one group; any values, any order.

    Returns:
        [N] float64 rewards without gradient, and [N] int64 group numbers (`group_numbers`).
    """
    check_group_ids(group_ids_N=group_ids_N)
    if rewards_N.ndim != 1:
        refuse(f"rewards_N must be a vector: {rewards_N.shape}")
    if rewards_N.shape != group_ids_N.shape:
        refuse(f"{rewards_N.shape} rewards for {group_ids_N.shape} group ids")
    rewards = rewards_N.detach().to(torch.float64)
    if not bool(rewards.isfinite().all()):
        refuse("a reward that is missing or failed must be dropped before advantages")
    return rewards, group_numbers(group_ids_N)


def group_numbers(*ids_N: Tensor) -> Tensor:
    """Group ids as dense numbers: 0 for the smallest id, 1 for the next, and so on.

    Args:
        ids_N: [N] int64, any values, any order; of several a group is what all of them name together, and the first
            counts most in the order.

    Returns:
        [N] int64 in 0..G-1, where G is how many different groups there are.
    """
    # sorted in place of `unique`, for the size of whose result the host would wait
    order_N = ids_N[-1].argsort(stable=True)
    for earlier_N in ids_N[-2::-1]:
        order_N = order_N[earlier_N[order_N].argsort(stable=True)]
    is_new_N = torch.zeros_like(order_N, dtype=torch.bool)
    for each_N in ids_N:
        sorted_N = each_N[order_N]
        is_new_N[1:] |= sorted_N[1:] != sorted_N[:-1]
    return torch.empty_like(order_N).scatter_(0, order_N, is_new_N.cumsum(0))


def num_groups(flags_N: Tensor, groups_N: Tensor) -> Tensor:
    """Count the groups that carry a flag.

    Args:
        flags_N: [N] bool, equal within a group.
        groups_N: [N] int64 group numbers.

    Returns:
        [] float64.
    """
    # all sequences of a group write the same flag, so the order of writing does not matter
    return torch.zeros_like(flags_N).scatter_(0, groups_N, flags_N).sum(dtype=torch.float64)


def group_sum(values_N: Tensor, groups_N: Tensor) -> Tensor:
    """Compute, at every sequence, the sum over its group.

    Args:
        values_N: [N] float64.
        groups_N: [N] int64 group numbers.

    Returns:
        [N] float64.
    """
    return torch.zeros_like(values_N).index_add_(0, groups_N, values_N).index_select(0, groups_N)


def group_size(groups_N: Tensor) -> Tensor:
    """Count, at every sequence, the sequences of its group.

    Args:
        groups_N: [N] int64 group numbers.

    Returns:
        [N] float64, at least 1.
    """
    return group_sum(torch.ones_like(groups_N, dtype=torch.float64), groups_N)


def group_mean(values_N: Tensor, groups_N: Tensor) -> Tensor:
    """Compute, at every sequence, the mean over its group.

    Args:
        values_N: [N] float64.
        groups_N: [N] int64 group numbers.

    Returns:
        [N] float64.
    """
    return group_sum(values_N, groups_N) / group_size(groups_N)


def is_constant(values_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return, at every sequence, whether all values of its group are equal, as those of a group of one are.

    Args:
        values_N: [N] float64.
        groups_N: [N] int64 group numbers.

    Returns:
        [N] bool.
    """
    # without the zeros of the result, which would count as values
    low_N = torch.zeros_like(values_N).scatter_reduce_(0, groups_N, values_N, "amin", include_self=False)
    high_N = torch.zeros_like(values_N).scatter_reduce_(0, groups_N, values_N, "amax", include_self=False)
    return (low_N == high_N)[groups_N]


def centred(values_N: Tensor, groups_N: Tensor) -> Tensor:
    """Values minus the mean of their group; exactly 0 where all values of the group are equal.

    The mean of eight times 0.1 is not 0.1 in floating point. Without the exception that rounding
    error is what a small epsilon would blow up to an advantage.

    Args:
        values_N: [N] float64.
        groups_N: [N] int64 group numbers.

    Returns:
        [N] float64.
    """
    return torch.where(is_constant(values_N, groups_N), 0.0, values_N - group_mean(values_N, groups_N))


def group_std(values_N: Tensor, groups_N: Tensor) -> Tensor:
    """Compute, at every sequence, the standard deviation of its group, with Bessel's correction.

    sqrt(sum (v - mean)^2 / (G - 1)); 0 for a group of one.

    Args:
        values_N: [N] float64.
        groups_N: [N] int64 group numbers.

    Returns:
        [N] float64.
    """
    return broadcast_to_members(centred(values_N, groups_N), groups_N)


def broadcast_to_members(centred_N: Tensor, groups_N: Tensor) -> Tensor:
    """`group_std` of values that are `centred` already.

    Args:
        centred_N: [N] float64.
        groups_N: [N] int64 group numbers.

    Returns:
        [N] float64.
    """
    squares_N = group_sum(centred_N.square(), groups_N)
    return (squares_N / (group_size(groups_N) - 1).clamp(min=1)).sqrt()


def ratio_or_zero(numerators_N: Tensor, denominators_N: Tensor) -> Tensor:
    """numerator / denominator, and 0 where the numerator is 0, whatever the denominator is.

    Args:
        numerators_N: [N] float64.
        denominators_N: [N] or broadcast to it, float64.

    Returns:
        [N] float64.
    """
    return torch.where(numerators_N == 0, 0.0, numerators_N / denominators_N)
