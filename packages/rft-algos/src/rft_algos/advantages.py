"""Advantages: how much better than expected each sampled sequence was.

Here: estimators that compare a sequence with the others sampled for its prompt (its group).
Not here: spreading a sequence's advantage over its tokens, which is the packing's job.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_norm(rewards_N: Tensor, group_ids_N: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Group-normalised outcome advantage of GRPO.

    A_i = (R_i - mean_g R) / (std_g R + epsilon), where g is the group of sequence i and std has
    Bessel's correction (divides by G - 1).

    Computed in float64, and exactly 0 where all rewards of a group are equal: in float32 eight
    rewards of 0.1 have a mean that is not 0.1, and dividing that rounding error by a small
    epsilon makes an advantage of almost 1. A group of one has no spread and gets 0 as well.

    Source: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1.

    Args:
        rewards_N: [N] finite rewards, any floating or integer type.
        group_ids_N: [N] int64, equal for the sequences of one prompt; any values, any order,
            groups may differ in size.
        epsilon: added to the standard deviation, in the unit of the rewards.

    Returns:
        [N] float64, no gradient. Example: rewards 1, 0, 0, 0 of one group give 1.5, -0.5, -0.5, -0.5
        (to within epsilon).
    """
    assert rewards_N.ndim == 1, f"rewards_N must be a vector: {rewards_N.shape}"
    assert rewards_N.shape == group_ids_N.shape, f"{rewards_N.shape} rewards for {group_ids_N.shape} group ids"
    rewards = rewards_N.detach().to(torch.float64)
    assert bool(rewards.isfinite().all()), "a reward that is missing or failed must be dropped before advantages"
    if rewards.numel() == 0:
        return rewards
    groups = torch.searchsorted(group_ids_N.sort().values, group_ids_N)  # any ids, as numbers in 0..N-1
    num_groups = rewards.numel()
    sizes_G = torch.bincount(groups, minlength=num_groups).to(torch.float64)

    centred = rewards - _group_sums(rewards, groups, num_groups).div(sizes_G)[groups]
    variances_G = _group_sums(centred.square(), groups, num_groups) / (sizes_G - 1).clamp(min=1)
    advantages = centred / (variances_G.sqrt()[groups] + epsilon)
    return torch.where(_is_constant(rewards, groups, num_groups)[groups], 0.0, advantages)


def _group_sums(values_N: Tensor, groups_N: Tensor, num_groups: int) -> Tensor:
    return values_N.new_zeros(num_groups).index_add_(0, groups_N, values_N)


def _is_constant(values_N: Tensor, groups_N: Tensor, num_groups: int) -> Tensor:
    empty_G = values_N.new_zeros(num_groups)
    low_G = empty_G.scatter_reduce(0, groups_N, values_N, "amin", include_self=False)
    high_G = empty_G.scatter_reduce(0, groups_N, values_N, "amax", include_self=False)
    return low_G == high_G
