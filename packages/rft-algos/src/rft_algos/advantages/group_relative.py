"""Advantages of sequences: how much better each was than the others that were sampled for its prompt.

All take [N] rewards and [N] group ids and give [N] float64 without gradient. Groups may differ
in size and their sequences may stand in any order. Equal rewards in a group, and so groups of
one, give exactly 0. Numbers over the batch (a standard deviation, a share of groups) are over
the [N] that are passed: give all sequences of the step, on all ranks, at once.

Not here: spreading a sequence's advantage over its tokens, which is the packing's job.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rft_algos.advantages.group_statistics import (
    broadcast_to_members,
    centred,
    group_mean,
    group_size,
    group_std,
    group_sum,
    grouped,
    is_constant,
    num_groups,
    ratio_or_zero,
)
from rft_algos.input_checks import check_not_negative, refuse


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
    check_not_negative(epsilon=epsilon)
    rewards_N, groups_N = grouped(rewards_N, group_ids_N)
    centred_N = centred(rewards_N, groups_N)
    return ratio_or_zero(centred_N, broadcast_to_members(centred_N, groups_N) + epsilon)


def group_centred(rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """Rewards minus the mean of their group: A_i = R_i - mean_g R.

    Without division by the spread, easy and hard prompts weigh the same per unit of reward. It is
    half of Dr. GRPO (the other half is the reduction `rft_algos.losses.aggregation.fixed_length`), and
    REINFORCE++-baseline before its whitening over the tokens of the batch
    (`rft_algos.advantages.whitening`).

    Sources: Liu et al. 2025, "Understanding R1-Zero-like training" (arXiv 2503.20783);
    Hu 2025, "REINFORCE++" (arXiv 2501.03262).

    Args:
        rewards_N: [N] finite rewards.
        group_ids_N: [N] int64, the group of each sequence.

    Returns:
        [N] float64, no gradient. Example: rewards 1, 0, 0, 0 give 0.75, -0.25, -0.25, -0.25.
    """
    return centred(*grouped(rewards_N, group_ids_N))


def batch_std(rewards_N: Tensor, group_ids_N: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Centred by group, scaled by batch: A_i = (R_i - mean_g R) / (std_batch R + epsilon).

    The spread of all rewards of the batch, with Bessel's correction, is a steadier scale than that
    of a group whose rewards are nearly equal.

    Source: Liu et al. 2025, "Tricks or Traps?" (arXiv 2508.08221), Lite PPO.

    Args:
        rewards_N: [N] finite rewards of the whole batch.
        group_ids_N: [N] int64, the group of each sequence.
        epsilon: added to the standard deviation, in the unit of the rewards.

    Returns:
        [N] float64, no gradient.
    """
    check_not_negative(epsilon=epsilon)
    rewards_N, groups_N = grouped(rewards_N, group_ids_N)
    # the spread is of the rewards as they are, with the whole batch as one group
    return ratio_or_zero(centred(rewards_N, groups_N), group_std(rewards_N, torch.zeros_like(groups_N)) + epsilon)


def leave_one_out(rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """RLOO: rewards minus the mean of the others in the group.

    A_i = R_i - (sum_{j in g, j != i} R_j) / (G - 1) = G / (G - 1) (R_i - mean_g R).

    Source: Ahmadian et al. 2024, "Back to basics" (arXiv 2402.14740).

    Args:
        rewards_N: [N] finite rewards.
        group_ids_N: [N] int64, the group of each sequence.

    Returns:
        [N] float64, no gradient; 0 for a group of one, which has nobody to compare with.
        Example: rewards 1, 0, 0, 0 give 1, -1/3, -1/3, -1/3.
    """
    rewards_N, groups_N = grouped(rewards_N, group_ids_N)
    sizes_N = group_size(groups_N)
    # a group of one leaves nothing out: its centred reward is 0 already
    return centred(rewards_N, groups_N) * sizes_N / (sizes_N - 1).clamp(min=1)


def max_rl(rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """MaxRL: A_i = (R_i - mean_g R) / mean_g R, and 0 where mean_g R <= 0.

    With rewards of 0 and 1 it estimates the gradient of the log-likelihood of success, not of its
    probability: a prompt that is rarely solved weighs more.

    Source: Tajwar et al. 2026, "Maximum likelihood reinforcement learning" (arXiv 2602.02710).

    Args:
        rewards_N: [N] finite rewards, meant to be 0 or 1.
        group_ids_N: [N] int64, the group of each sequence.

    Returns:
        [N] float64, no gradient. Example: rewards 1, 0, 0, 0 give 3, -1, -1, -1.
    """
    rewards_N, groups_N = grouped(rewards_N, group_ids_N)
    means_N = group_mean(rewards_N, groups_N)
    # the other branch may divide by 0; no gradient flows here, so that NaN is dropped and gone
    return torch.where(means_N > 0, centred(rewards_N, groups_N) / means_N, 0.0)


def opo(rewards_N: Tensor, group_ids_N: Tensor, lengths_N: Tensor) -> Tensor:
    """OPO: rewards minus the length-weighted mean of their group.

    A_i = R_i - (sum_{j in g} L_j R_j) / (sum_{j in g} L_j).

    This is the baseline of least variance if the squared norm of a sequence's gradient grows with
    its length. In a group without any token all lengths count the same.

    Source: Hao et al. 2025, "On-policy RL with optimal reward baseline" (arXiv 2505.23585).

    Args:
        rewards_N: [N] finite rewards.
        group_ids_N: [N] int64, the group of each sequence.
        lengths_N: [N] how many loss tokens each sequence has.

    Returns:
        [N] float64, no gradient. Example: rewards 1, 0 of lengths 3, 1 give 0.25, -0.75.
    """
    if lengths_N.shape != rewards_N.shape:
        refuse(f"{lengths_N.shape} lengths for {rewards_N.shape} rewards")
    rewards_N, groups_N = grouped(rewards_N, group_ids_N)
    lengths = lengths_N.detach().to(torch.float64)
    # weighing centred rewards keeps digits far from 0, and equal rewards exactly 0
    centred_N = centred(rewards_N, groups_N)
    return centred_N - group_sum(lengths * centred_N, groups_N) / group_sum(lengths, groups_N).clamp(min=1)


def gpg(rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """GPG: A_i = alpha (R_i - mean_g R), alpha = B / (B - M).

    B counts the sequences of the batch and M those without signal, in groups of equal rewards. They
    add nothing to the gradient but count in its mean; alpha makes it the mean over the others.
    (Counting the sequences of reward 0 as M instead makes alpha follow accuracy, not signal.)

    Source: Chu et al. 2025, "GPG" (arXiv 2504.02546), with F_norm = 1.

    Args:
        rewards_N: [N] finite rewards of the whole batch.
        group_ids_N: [N] int64, the group of each sequence.

    Returns:
        [N] float64, no gradient; all 0 if no group has signal.
    """
    rewards_N, groups_N = grouped(rewards_N, group_ids_N)
    num_with_signal = (~is_constant(rewards_N, groups_N)).sum(dtype=torch.float64)
    # alpha as one quotient with the rewards: without any signal it is 0 / 0, which counts as 0
    return ratio_or_zero(centred(rewards_N, groups_N) * rewards_N.numel(), num_with_signal)


def cpgd(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    *,
    weighting: Literal["equal", "std", "clip_filter"],
    epsilon: float = 1e-6,
    max_weight: float = 3.0,
) -> Tensor:
    """CPGD: A_i = omega (R_i - mean_g R), with one of three weights of a prompt.

    "equal": omega = 1. "std": omega = 1 / (std_g R + epsilon), which is `group_norm`.
    "clip_filter": omega = min(number of groups / number of groups with signal, max_weight), which
    makes up for groups of equal rewards as filtering them out would, with a limit.

    Source: Liu et al. 2025, "CPGD" (arXiv 2505.12504), weighted advantage.

    Args:
        rewards_N: [N] finite rewards of the whole batch.
        group_ids_N: [N] int64, the group of each sequence.
        weighting: which omega.
        epsilon: added to the standard deviation, for "std" only.
        max_weight: the limit of "clip_filter".

    Returns:
        [N] float64, no gradient.
    """
    check_not_negative(epsilon=epsilon)
    if weighting not in ("equal", "std", "clip_filter"):
        refuse(f"no weighting of CPGD: {weighting}")
    if weighting == "equal":
        return group_centred(rewards_N, group_ids_N)
    if weighting == "std":
        return group_norm(rewards_N, group_ids_N, epsilon=epsilon)
    rewards_N, groups_N = grouped(rewards_N, group_ids_N)
    constant_N = is_constant(rewards_N, groups_N)
    share = num_groups(torch.ones_like(constant_N), groups_N) / num_groups(~constant_N, groups_N).clamp(min=1)
    return centred(rewards_N, groups_N) * share.clamp(max=max_weight)


def gdpo(components_NK: Tensor, group_ids_N: Tensor, weights_K: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """GDPO before its whitening: the weighted sum of the components' own group-normalised advantages.

    A_i = sum_k w_k (R_ik - mean_g R_k) / (std_g R_k + epsilon).

    Normalising the sum instead gives many different combinations of components the same advantage.
    The paper then normalises A over the sequences of the batch; `rft_algos.advantages.whitening` does that.

    Source: Liu et al. 2026, "GDPO" (arXiv 2601.05242).

    Args:
        components_NK: [N, K] finite reward components of each sequence.
        group_ids_N: [N] int64, the group of each sequence.
        weights_K: [K] weights of the components.
        epsilon: added to each standard deviation, in the unit of the component.

    Returns:
        [N] float64, no gradient.
    """
    check_not_negative(epsilon=epsilon)
    if components_NK.ndim != 2:
        refuse(f"components_NK must be a matrix: {components_NK.shape}")
    if weights_K.shape != components_NK.shape[1:]:
        refuse(f"{weights_K.shape} weights for {components_NK.shape} components")
    total_N = torch.zeros_like(group_ids_N, dtype=torch.float64)
    for rewards_N, weight in zip(components_NK.unbind(1), weights_K.detach().to(torch.float64), strict=True):
        total_N += weight * group_norm(rewards_N, group_ids_N, epsilon=epsilon)
    return total_N


def remax(rewards_N: Tensor, greedy_rewards_N: Tensor) -> Tensor:
    """ReMax: A_i = R_i - R(greedy response to the same prompt).

    Source: Li et al. 2023, "ReMax" (arXiv 2310.10505).

    Args:
        rewards_N: [N] finite rewards.
        greedy_rewards_N: [N] reward of the greedy response to the prompt of each sequence.

    Returns:
        [N] float64, no gradient.
    """
    if rewards_N.shape != greedy_rewards_N.shape:
        refuse(f"{rewards_N.shape} against {greedy_rewards_N.shape}")
    advantages_N = rewards_N.detach().to(torch.float64) - greedy_rewards_N.detach().to(torch.float64)
    if not bool(advantages_N.isfinite().all()):
        refuse("a reward that is missing or failed must be dropped before advantages")
    return advantages_N
