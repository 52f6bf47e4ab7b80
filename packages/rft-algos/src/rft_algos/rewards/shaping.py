"""Shaping of rewards: lengths, truncation, and the scale of rewards over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos.advantages.group_statistics import group_numbers
from rft_algos.advantages.whitening import Moments, moments
from rft_algos.input_checks import refuse
from rft_algos.packed.tensor_checks import check_mask


def soft_overlong_penalty(lengths_N: Tensor, *, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Penalty that grows linearly over the last `buffer` tokens before the limit, to be added to the reward.

    p_i = -factor * clip((L_i - (max_length - buffer)) / buffer, 0, 1).

    It stays at -factor beyond max_length, which a conversation of several turns can exceed.

    Source: Yu et al. 2025, "DAPO" (arXiv 2503.14476), equation 13.

    Args:
        lengths_N: [N] how many tokens each sequence has.
        max_length: where the penalty is full, in tokens.
        buffer: over how many tokens it grows, in 1..max_length.
        factor: the full penalty, in the unit of the rewards.

    Returns:
        [N] float64 in [-factor, 0]. Example: max_length 10 and buffer 4 give 0 at 6 tokens, -1/4 at 7, -1 at 10.
    """
    if not 0 < buffer <= max_length:
        refuse(f"the buffer must be in 1..{max_length}: {buffer}")
    excess_N = (lengths_N.to(torch.float64) - (max_length - buffer)) / buffer
    return excess_N.clamp(0, 1) * -factor


def stop_properly(rewards_N: Tensor, truncated_N: Tensor, *, coefficient: float) -> Tensor:
    """Rewards of truncated sequences scaled down: R'_i = coefficient * R_i where truncated, else R_i.

    Meant for rewards of at least 0; a negative one would shrink as well.

    Source: the stop-properly penalty of ProRL v2 (NVIDIA, 2025).

    Args:
        rewards_N: [N] rewards.
        truncated_N: [N] bool, true where generation ran into its limit instead of stopping.
        coefficient: in [0, 1]; 1 changes nothing.

    Returns:
        [N] float64, no gradient.
    """
    check_mask(truncated_N=truncated_N)
    if not 0 <= coefficient <= 1:
        refuse(f"the coefficient must be in [0, 1]: {coefficient}")
    rewards = rewards_N.detach().to(torch.float64)
    return torch.where(truncated_N, coefficient * rewards, rewards)


def truncated_keep(finished_N: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor) -> Tensor:
    """Overlong filtering: the loss mask without the tokens of sequences that did not finish.

    m'_t = m_t and finished_i.

    A truncated sequence keeps its reward, so it still counts in the baseline of its group.

    Source: Yu et al. 2025, "DAPO" (arXiv 2503.14476), section 3.4.

    Args:
        finished_N: [N] bool, false where generation ran into its limit.
        loss_mask_T: [T] bool, true at tokens that the policy sampled.
        segment_ids_T: [T] int64 in 0..N-1, the sequence of each token; ignored where masked.

    Returns:
        [T] bool.
    """
    check_mask(finished_N=finished_N)
    check_mask(loss_mask_T=loss_mask_T)
    # where masked any valid index will do
    return loss_mask_T & finished_N[torch.where(loss_mask_T, segment_ids_T, 0)]


def cosine_length_reward(
    correct_N: Tensor,
    lengths_N: Tensor,
    *,
    max_length: int,
    correct_short: float = 2.0,
    correct_long: float = 1.0,
    wrong_short: float = -10.0,
    wrong_long: float = 0.0,
    exceeded: float = -10.0,
) -> Tensor:
    """Reward by correctness and length: short when right, long when wrong.

    R_i = long + (short - long) (1 + cos(pi L_i / max_length)) / 2, with the pair of values for correct or
    for wrong answers; R_i = exceeded at max_length or beyond.

    Source: Yeo et al. 2025, "Demystifying long chain-of-thought reasoning" (arXiv 2502.03373).

    Args:
        correct_N: [N] bool.
        lengths_N: [N] how many tokens each sequence has.
        max_length: where a sequence counts as exceeded, in tokens.
        correct_short: reward of a correct answer of length 0.
        correct_long: what that of a correct answer falls to at max_length.
        wrong_short: reward of a wrong answer of length 0.
        wrong_long: what that of a wrong answer rises to at max_length.
        exceeded: reward at max_length or beyond, right or wrong.

    Returns:
        [N] float64.
    """
    check_mask(correct_N=correct_N)
    if correct_N.shape != lengths_N.shape:
        refuse(f"{correct_N.shape} correct, {lengths_N.shape} lengths")
    lengths = lengths_N.to(torch.float64)
    share_N = (1 + torch.cos(lengths * (math.pi / max_length))) / 2
    right_N = correct_long + (correct_short - correct_long) * share_N
    wrong_N = wrong_long + (wrong_short - wrong_long) * share_N
    return torch.where(lengths < max_length, torch.where(correct_N, right_N, wrong_N), exceeded)


def kimi_length_reward(correct_N: Tensor, lengths_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """Length reward within a group, to be added to the reward with a weight.

    lambda_i = 1/2 - (L_i - min_g L) / (max_g L - min_g L);   lambda_i if correct, min(0, lambda_i) if wrong.

    0 where all lengths of the group are equal. Wrong answers gain nothing from being short.

    Source: Kimi team 2025, "Kimi k1.5" (arXiv 2501.12599), length penalty.

    Args:
        correct_N: [N] bool.
        lengths_N: [N] how many tokens each sequence has.
        group_ids_N: [N] int64, the group of each sequence.

    Returns:
        [N] float64 in [-1/2, 1/2]. Example: correct answers of 10, 20, 30 tokens give 1/2, 0, -1/2.
    """
    check_mask(correct_N=correct_N)
    if correct_N.shape != lengths_N.shape:
        refuse(f"{correct_N.shape} correct, {lengths_N.shape} lengths")
    groups_N = group_numbers(group_ids_N)
    lengths = lengths_N.to(torch.float64)
    empty_N = torch.zeros_like(lengths)
    shortest_N = empty_N.scatter_reduce(0, groups_N, lengths, "amin", include_self=False)[groups_N]
    longest_N = empty_N.scatter_reduce(0, groups_N, lengths, "amax", include_self=False)[groups_N]
    # 0 / 0 where all lengths are equal, replaced below
    lambda_N = 0.5 - (lengths - shortest_N) / (longest_N - shortest_N)
    lambda_N = torch.where(longest_N > shortest_N, lambda_N, 0.0)
    return torch.where(correct_N, lambda_N, lambda_N.clamp(max=0))


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Moments of all rewards of a run so far, as plain numbers that a checkpoint can hold as JSON.

    Each step gives a new record. Updating batch by batch, in any order, is to rounding the same as
    once with everything.
    """

    count: int = 0
    """How many rewards."""
    mean: float = 0.0
    """Their mean."""
    m2: float = 0.0
    """Their sum of (r - mean)^2."""

    def update(self, rewards_N: Tensor) -> RunningMoments:
        """The moments with a batch added (`rft_algos.advantages.Moments.merge`).

        Args:
            rewards_N: [N] finite rewards, of all ranks.
        """
        if not bool(rewards_N.isfinite().all()):
            refuse("a reward that is missing or failed must be dropped before moments")
        so_far = Moments(*torch.tensor([self.count, self.mean, self.m2], dtype=torch.float64).unbind())
        # on the host, because the record holds plain numbers
        batch = moments(rewards_N.cpu(), torch.ones(rewards_N.shape, dtype=torch.bool))
        merged = so_far.merge(batch)
        return RunningMoments(int(merged.count), float(merged.mean), float(merged.m2))

    @property
    def std(self) -> float:
        """sqrt(m2 / (count - 1)), with Bessel's correction; 0 before the second reward."""
        return math.sqrt(self.m2 / max(self.count - 1, 1))

    def normalise(self, rewards_N: Tensor, *, minus_mean: bool, epsilon: float = 1e-8) -> Tensor:
        """Rewards on the scale of the run: r / (std + epsilon), or (r - mean) / (std + epsilon).

        Without the mean, the sign of a reward and what 0 means stay. While all rewards so far were
        equal there is no scale, and nothing is divided.

        Args:
            rewards_N: [N] rewards.
            minus_mean: subtract the mean first.
            epsilon: added to the standard deviation, in the unit of the rewards.

        Returns:
            [N] float64, no gradient.
        """
        rewards = rewards_N.detach().to(torch.float64)
        if minus_mean:
            rewards = rewards - self.mean
        return rewards / (self.std + epsilon) if self.std > 0 else rewards
