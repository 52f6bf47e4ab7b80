"""Filters of groups of rollouts worth training on, and the number of prompts to sample for those that are not.

Give the rewards before shaping by length and the like: a penalty for long responses makes a group of
right answers look as if it had something to teach.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos.advantages.group_statistics import group_mean, grouped, is_constant, num_groups
from rft_algos.input_checks import refuse
from rft_core.errors import OptionsError

_ROUNDING = 1e-9
"""Means within this of a bound count as the bound: the order in which rewards are added must not decide."""


def has_reward_variance(rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """Return whether the rewards of a sequence's group differ, so that comparing them teaches something.

    Exact: equal rewards are equal whatever their value, and no tolerance hides a small difference.
    For rewards of right and wrong this is the condition of dynamic sampling: at least one of each.

    Source: Yu et al. 2025, "DAPO" (arXiv 2503.14476), the constraint of equation 11.

    Args:
        rewards_N: [N] finite rewards, any floating or integer type.
        group_ids_N: [N] int64, equal for the sequences of one prompt; any values, any order, groups
            may differ in size.

    Returns:
        [N] bool, the same for all of a group; False for a group of one.
    """
    return ~is_constant(*grouped(rewards_N, group_ids_N))


def fraction_with_variance(rewards_N: Tensor, group_ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Count the groups with a signal, and all groups: totals and counts add over ranks, then divide.

    Args:
        rewards_N: [N] finite rewards.
        group_ids_N: [N] int64; a group must be whole.

    Returns:
        total [] groups whose rewards differ (`has_reward_variance`) and count [] groups, float64.
    """
    rewards, groups = grouped(rewards_N, group_ids_N)
    signal_N = ~is_constant(rewards, groups)
    return num_groups(signal_N, groups), num_groups(torch.ones_like(signal_N), groups)


def accuracy_between(rewards_N: Tensor, group_ids_N: Tensor, low: float, high: float) -> Tensor:
    """Return whether the mean reward of a sequence's group is in [low, high]: prompts neither too hard nor too easy.

    With rewards of 0 and 1 the mean is the share of right answers. Both bounds are included;
    `has_reward_variance` is for what excludes exactly the groups of none and of all.

    Source: Cui et al. 2025, "PRIME" (arXiv 2502.01456), online prompt filtering with 0.2 and 0.8.

    Args:
        rewards_N: [N] finite rewards.
        group_ids_N: [N] int64; any values, any order, groups may differ in size.
        low: least mean reward, in the unit of the rewards.
        high: largest mean reward.

    Returns:
        [N] bool, the same for all of a group.
    """
    if not low <= high:
        refuse(f"low = {low} is above high = {high}")
    means_N = group_mean(*grouped(rewards_N, group_ids_N))
    return (means_N >= low - _ROUNDING) & (means_N <= high + _ROUNDING)


@dataclass(frozen=True, slots=True)
class DynamicSamplingRefill:
    """Dynamic sampling: sample prompts until enough groups are kept, for a bounded number of rounds.

    Example: DynamicSamplingRefill(wanted=64, max_rounds=3) samples 64 prompts first. If 50 groups are kept it
    samples 14 more, and if 4 of those are not kept, 4 in the third and last round.
    """

    wanted: int
    """Groups that a step trains on."""
    max_rounds: int
    """Rounds of sampling in all, the first included."""

    def __post_init__(self) -> None:
        for name, value in (("wanted", self.wanted), ("max_rounds", self.max_rounds)):
            if value < 1:
                raise OptionsError(
                    code="filtering.refill",
                    what=f"{name} = {value}",
                    where=f"{name} of dynamic sampling",
                    why="it must be 1 or more",
                    do=f"{name}=1",
                )

    def missing(self, num_kept: int) -> int:
        """Groups that are still missing (no tensors).

        Args:
            num_kept: groups kept so far, over all rounds.

        Returns:
            0 or more.
        """
        return max(0, self.wanted - num_kept)

    def prompts_to_sample(self, num_kept: int, num_rounds: int) -> int:
        """Prompts to sample in the next round: exactly the missing ones, as many as could be kept (no tensors).

        Args:
            num_kept: groups kept so far, over all rounds.
            num_rounds: rounds sampled so far; 0 before the first.

        Returns:
            0 where enough are kept or the rounds are used up (`is_exhausted`).
        """
        return 0 if num_rounds >= self.max_rounds else self.missing(num_kept)

    def is_exhausted(self, num_kept: int, num_rounds: int) -> bool:
        """Return whether the rounds are used up with groups still missing (no tensors).

        Args:
            num_kept: groups kept so far, over all rounds.
            num_rounds: rounds sampled so far.
        """
        return num_rounds >= self.max_rounds and self.missing(num_kept) > 0
