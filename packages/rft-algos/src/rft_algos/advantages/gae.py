"""Generalised advantage estimation: advantages of tokens from a learned value of every token.

Tokens that the policy did not sample are not steps of the decision process. Past an observation
the value and the advantage of the next sampled token are carried forward without discount; what
the critic says at the observation itself is not used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rft_algos.input_checks import check_positive, check_unit, refuse
from rft_algos.packed.reverse_scan import (
    gather_loss_tokens,
    last_positions,
    loss_positions,
    reverse_scan,
    reverse_scan_,
    same_sequence,
    scatter_loss_tokens,
)
from rft_algos.packed.tensor_checks import check_mask


def gae(
    token_rewards_T: Tensor,
    values_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    *,
    gamma: float = 1.0,
    lambd: float = 0.95,
    turn_gamma: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Exponentially weighted temporal differences, and the returns that the critic should predict.

    delta_t = r_t + g_t V_{t'} - V_t,   A_t = delta_t + g_t lambd A_{t'},   G_t = A_t + V_t,

    where t' is the next loss token of the sequence; V and A are 0 beyond the last one. lambd 1
    gives the return minus V_t, lambd 0 gives delta_t.

    Over turns: the tokens of an observation between t and t' are skipped, so that the value after a
    turn's last token is that of the next turn's first token, which has read the observation. g_t is
    gamma; with `turn_gamma` it is that where an observation lies between t and t', which counts
    time in turns (gamma 1 and turn_gamma below 1) or in both.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation" (arXiv 1506.02438), equation 16.

    Args:
        token_rewards_T: [T] rewards (`rewards.kl_penalty.token_rewards`); ignored, NaN included, where masked.
        values_T: [T] V, the expected return from each token on; ignored, NaN included, where masked.
        loss_mask_T: [T] bool, true at tokens that the policy sampled.
        segment_ids_T: [T] int64, the sequence of each token; the tokens of one are contiguous.
        gamma: discount from one loss token to the next, in [0, 1].
        lambd: lambda, how far a temporal difference reaches, in [0, 1].
        turn_gamma: discount across an observation, in [0, 1]; None for gamma there too.

    Returns:
        [T] advantages and [T] returns, float64, no gradient; 0 where masked. Example: one token a turn, an
        observation between, rewards 0 and 1, values 0.5 and 0.8, lambd 1, turn_gamma 0.5: returns 0.5, 0, 1.
    """
    check_unit(gamma=gamma, lambd=lambd, turn_gamma=turn_gamma)
    steps = _steps(token_rewards_T, values_T, loss_mask_T, segment_ids_T, gamma, turn_gamma)
    # in place: the steps are copies, and this is the last use of both
    advantages_L = reverse_scan_(steps.deltas_L, steps.discounts_L.mul_(lambd))
    returns_L = steps.values_L.add_(advantages_L)
    return _place(steps, advantages_L, loss_mask_T), _place(steps, returns_L, loss_mask_T)


def bootstrap_truncated(
    token_rewards_T: Tensor,
    next_values_N: Tensor,
    truncated_N: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    *,
    gamma: float = 1.0,
) -> Tensor:
    """Add to the last reward of a truncated sequence what its continuation would have earned.

    r_t += gamma V(next state) at the last loss token of each truncated sequence. A response that was cut off by a limit
    has not ended: with V = 0 beyond it, `gae` and `discounted_returns` would count all that was to come as lost. Given
    these rewards, the last temporal difference is r + gamma V(next) - V_t.

    Source: Pardo et al. 2018, "Time limits in reinforcement learning" (arXiv 1712.00378).

    Args:
        token_rewards_T: [T] rewards of tokens.
        next_values_N: [N] the critic's value after the last token of each sequence; ignored, NaN included, where it is
            not truncated.
        truncated_N: [N] bool, true where a limit cut the sequence off.
        loss_mask_T: [T] bool, true at tokens that the policy sampled.
        segment_ids_T: [T] int64 in 0..N-1, the sequence of each token; the tokens of one are contiguous.
        gamma: discount from one loss token to the next, in [0, 1].

    Returns:
        [T] float64 rewards, no gradient.
    """
    check_unit(gamma=gamma)
    check_mask(truncated_N=truncated_N)
    ends_I = last_positions(segment_ids_T, loss_positions(loss_mask_T))
    extra_N = torch.where(truncated_N, gamma * next_values_N.detach().to(torch.float64), 0.0)
    return token_rewards_T.detach().to(torch.float64).index_add(0, ends_I, extra_N[segment_ids_T[ends_I]])


def decoupled_gae(
    token_rewards_T: Tensor,
    values_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    *,
    gamma: float = 1.0,
    lambd_policy: float | Tensor = 0.95,
    lambd_value: float = 1.0,
    turn_gamma: float | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE with one lambda for the advantages and another one for the returns.

    The two results of `gae`, the first with lambd_policy and the second with lambd_value. Returns
    with lambda 1 do not depend on the critic, so that the reward at the end of a long sequence
    reaches its start; advantages with a smaller lambda vary less.

    Source: Yuan et al. 2025, "What's behind PPO's collapse in long-CoT?" (VC-PPO, arXiv 2503.01491);
    used with `length_adaptive_lambda` in VAPO (arXiv 2504.05118).

    Args:
        token_rewards_T: [T] rewards; ignored, NaN included, where masked.
        values_T: [T] V; ignored, NaN included, where masked.
        loss_mask_T: [T] bool, true at tokens that the policy sampled.
        segment_ids_T: [T] int64, the sequence of each token; the tokens of one are contiguous.
        gamma: discount from one loss token to the next, in [0, 1].
        lambd_policy: lambda of the advantages, in [0, 1]; a tensor is [T], equal within a sequence.
        lambd_value: lambda of the returns, in [0, 1].
        turn_gamma: discount across an observation, in [0, 1]; None for gamma there too.

    Returns:
        [T] advantages and [T] returns, float64, no gradient; 0 where masked.
    """
    check_unit(gamma=gamma, lambd_value=lambd_value, turn_gamma=turn_gamma)
    if not isinstance(lambd_policy, Tensor):
        check_unit(lambd_policy=lambd_policy)
    steps = _steps(token_rewards_T, values_T, loss_mask_T, segment_ids_T, gamma, turn_gamma)
    if isinstance(lambd_policy, Tensor):
        if lambd_policy.shape != loss_mask_T.shape:
            refuse(f"{lambd_policy.shape} lambdas, {loss_mask_T.shape} mask")
        lambd_policy = gather_loss_tokens(lambd_policy, steps.positions_L)
    # not in place, because the deltas are needed once more for the returns
    advantages_L = reverse_scan(steps.deltas_L, steps.discounts_L * lambd_policy)
    returns_L = reverse_scan_(steps.deltas_L, steps.discounts_L.mul_(lambd_value)).add_(steps.values_L)
    return _place(steps, advantages_L, loss_mask_T), _place(steps, returns_L, loss_mask_T)


def length_adaptive_lambda(lengths_T: Tensor, *, alpha: float = 0.05) -> Tensor:
    """Lambda by length, for `decoupled_gae`: lambda = max(0, 1 - 1 / (alpha l)).

    The weights lambda^n of all temporal differences then add up to alpha l, so that their reach
    grows with the length of the sequence.

    Source: Yue et al. 2025, "VAPO" (arXiv 2504.05118), length-adaptive GAE.

    Args:
        lengths_T: [T] how many loss tokens the sequence of each token has
            (`rft_algos.packed.segments.segment_lengths`).
        alpha: share of the length that the weights add up to, positive.

    Returns:
        [T] float64 in [0, 1); 0 for sequences of at most 1 / alpha tokens.
    """
    check_positive(alpha=alpha)
    return (1 - 1 / (alpha * lengths_T.detach().to(torch.float64))).clamp(min=0)


class _Steps(NamedTuple):
    """The L loss tokens as steps of the decision process; each field is in memory of its own."""

    positions_L: Tensor | None
    values_L: Tensor
    discounts_L: Tensor
    """gamma (turn_gamma before an observation), and 0 at the last step of a sequence."""
    deltas_L: Tensor


def _steps(
    token_rewards_T: Tensor,
    values_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    gamma: float,
    turn_gamma: float | None = None,
) -> _Steps:
    if token_rewards_T.shape != loss_mask_T.shape:
        refuse(f"{token_rewards_T.shape} rewards, {loss_mask_T.shape} mask")
    if values_T.shape != loss_mask_T.shape:
        refuse(f"{values_T.shape} values, {loss_mask_T.shape} mask")
    if segment_ids_T.shape != loss_mask_T.shape:
        refuse(f"{segment_ids_T.shape} segment ids, {loss_mask_T.shape} mask")
    positions_L = loss_positions(loss_mask_T)
    values_L = gather_loss_tokens(values_T, positions_L)
    discounts_L = (
        same_sequence(segment_ids_T, positions_L).to(torch.float64).mul_(_gammas(positions_L, gamma, turn_gamma))
    )
    deltas_L = gather_loss_tokens(token_rewards_T, positions_L).sub_(values_L)
    # the discount is 0 at the end of a sequence, so no value reaches the one before it
    deltas_L[:-1].addcmul_(discounts_L[:-1], values_L[1:])
    return _Steps(positions_L, values_L, discounts_L, deltas_L)


def _gammas(positions_L: Tensor | None, gamma: float, turn_gamma: float | None) -> Tensor | float:
    """The discount after each loss token: `turn_gamma` where the next one does not stand right behind it."""
    # where every token is sampled there is no observation, and so no border between turns
    if turn_gamma is None or positions_L is None:
        return gamma
    gammas_L = torch.full(positions_L.shape, gamma, dtype=torch.float64, device=positions_L.device)
    # a gap between loss tokens is an observation; from one sequence to the next the discount is 0 anyway
    gammas_L[:-1][positions_L.diff() > 1] = turn_gamma
    return gammas_L


def _place(steps: _Steps, results_L: Tensor, loss_mask_T: Tensor) -> Tensor:
    return scatter_loss_tokens(results_L, steps.positions_L, loss_mask_T.shape[0])
