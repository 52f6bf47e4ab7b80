"""Clip-Cov and KL-Cov: hold back the few tokens that make the entropy collapse.

A step changes the policy's entropy by about minus the covariance of log-prob and advantage, and a
small share of the tokens carries nearly all of it. These tokens are found on the whole batch, with
the log-probs of the policy that starts the step, before the batch is cut: `token_covariances`,
then a selection. The losses get the selection as a mask.

Source of all: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning
Language Models" (arXiv 2505.22617).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.registry import register_clip_mask, register_equation
from rft_algos.input_checks import check_not_negative, refuse
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.packed.tensor_checks import check_mask
from rft_algos.packed.token_selection import largest, share
from rft_algos.surrogates.ppo import ppo_clip, ppo_clipped
from rft_algos.surrogates.reinforce import importance_weighted
from rft_core.keyed_random import threefry2x32


def token_covariances(logprobs_T: Tensor, advantages_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """Each token's part of the covariance of log-prob and advantage.

    cov_t = (log pi_t - mean log pi) (A_t - mean A), means over the loss tokens of the whole batch.

    Args:
        logprobs_T: [T] log pi of every token of the batch, in nats.
        advantages_T: [T] advantages.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.

    Returns:
        [T] float64, no gradient; 0 where masked.
    """
    check_mask(loss_mask_T=loss_mask_T)
    product_T = _centred(logprobs_T, loss_mask_T) * _centred(advantages_T, loss_mask_T)
    return torch.where(loss_mask_T, product_T, 0.0)


def select_clip_cov(
    cov_T: Tensor, loss_mask_T: Tensor, *, low: float = 1.0, high: float = 5.0, fraction: float = 2e-4, key: int
) -> Tensor:
    """A random few of the tokens with a large covariance, for `clip_cov`.

    Draws max(1, floor(fraction * n)) of the n loss tokens, or as many as there are, from those with
    low <= cov_t <= high.

    A token's draw depends on the key and on its position in the batch alone. verl draws within each micro-batch, and
    leaves out tokens that PPO clips there: the gradient is the same, since such a token has none, and the value of the
    loss differs. Here the draw is at the start of the step, where no ratio has left its bounds.

    Source: arXiv 2505.22617; defaults from its experiments.

    Args:
        cov_T: [T] from `token_covariances`, over the whole batch in its lasting order.
        loss_mask_T: [T] bool.
        low: smallest covariance that can be drawn.
        high: largest covariance that can be drawn.
        fraction: of the loss tokens to draw, in (0, 1].
        key: of the draw, from `keyed_random.derive_key`.

    Returns:
        [T] bool, a part of `loss_mask_T`.
    """
    if cov_T.shape != loss_mask_T.shape:
        refuse(f"{cov_T.shape} covariances for {loss_mask_T.shape} mask")
    num = share(loss_mask_T, fraction)
    candidates_C = (loss_mask_T & (cov_T >= low) & (cov_T <= high)).nonzero().squeeze(1)
    # the candidates with the smallest draws are a uniform sample of them
    drawn = candidates_C[_draws(key, candidates_C).argsort(stable=True)[:num]]
    return torch.zeros_like(loss_mask_T).index_fill(0, drawn, True)


def select_kl_cov(cov_T: Tensor, loss_mask_T: Tensor, *, fraction: float = 2e-3) -> Tensor:
    """The tokens with the largest covariance, for `kl_cov`.

    The max(1, floor(fraction * n)) of the n loss tokens; of equals, the earlier.

    Source: arXiv 2505.22617; the default is that of its 7-billion model, 2e-4 that of the 32-billion one.

    Args:
        cov_T: [T] from `token_covariances`, over the whole batch.
        loss_mask_T: [T] bool.
        fraction: of the loss tokens to select, in (0, 1].

    Returns:
        [T] bool, a part of `loss_mask_T`.
    """
    return largest(cov_T, loss_mask_T, share(loss_mask_T, fraction))


def clip_cov(
    log_ratio_T: Tensor, advantages_T: Tensor, selected_T: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's clipped surrogate without the selected tokens, as a loss.

    l_t = 0 where selected, `ppo_clip` elsewhere.

    As in the paper, a selected token has neither value nor gradient. It still counts in the
    denominator, which was fixed before the selection.

    Source: arXiv 2505.22617.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        selected_T: [T] bool, from `select_clip_cov`.
        clip_low: as in `ppo_clip`.
        clip_high: as in `ppo_clip`.

    Returns:
        [T] loss per token.
    """
    return torch.where(selected_T, 0.0, ppo_clip(log_ratio_T, advantages_T, clip_low, clip_high))


def clip_cov_clipped(
    log_ratio_T: Tensor, advantages_T: Tensor, selected_T: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Mask the tokens to which `clip_cov` gives no gradient: selected, or clipped as in PPO.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.
        advantages_T: [T] advantages.
        selected_T: [T] bool, from `select_clip_cov`.
        clip_low: as in `ppo_clip`.
        clip_high: as in `ppo_clip`.

    Returns:
        [T] bool.
    """
    return selected_T | ppo_clipped(log_ratio_T, advantages_T, clip_low, clip_high)


def kl_cov(log_ratio_T: Tensor, advantages_T: Tensor, selected_T: Tensor, coefficient: float = 1.0) -> Tensor:
    """Importance-weighted policy gradient that holds the selected tokens at the old policy, as a loss.

    l_t = -A_t r_t + coefficient * |log pi_t - log pi_old,t| where selected, -A_t r_t elsewhere.

    The paper writes KL(pi_old || pi) for the penalty; the absolute log-ratio is what its code uses.
    No ratio is clipped.

    Source: arXiv 2505.22617.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        selected_T: [T] bool, from `select_kl_cov`.
        coefficient: of the penalty, in advantage per nat.

    Returns:
        [T] loss per token. At the old policy its gradient is -A_t.
    """
    check_not_negative(coefficient=coefficient)
    penalty_T = torch.where(selected_T, coefficient * log_ratio_T.abs(), 0.0)
    return importance_weighted(log_ratio_T, advantages_T) + penalty_T


def _centred(values_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    kept_T = torch.where(loss_mask_T, values_T.detach().to(torch.float64), 0.0)
    return kept_T - kept_T.sum() / loss_mask_T.sum().clamp(min=1)


def _draws(key: int, positions_C: Tensor) -> Tensor:
    """The draws of `keyed_random.uniforms` at these positions, as integers, without those in between."""
    word = 0xFFFFFFFF
    key_words = [torch.full_like(positions_C, (key >> shift) & word) for shift in (32, 0)]
    high_C, low_C = threefry2x32(key_words[0], key_words[1], positions_C >> 32, positions_C & word)
    # 53 bits, as many as a uniform of `keyed_random` has
    return (high_C << 21) | (low_C >> 11)


@register_equation(components.ClipCov)
def _clip_cov(choice: components.ClipCov, tokens: Tokens) -> Tensor:
    if tokens.selected is None:
        refuse("Clip-Cov needs the tokens selected over the whole batch")
    return clip_cov(tokens.log_ratio, tokens.advantages, tokens.selected, choice.low, choice.high)


@register_clip_mask(components.ClipCov)
def _clip_cov_clipped(choice: components.ClipCov, tokens: Tokens) -> Tensor:
    if tokens.selected is None:
        refuse("Clip-Cov needs the tokens selected over the whole batch")
    clipped_T = ppo_clipped(tokens.log_ratio, tokens.advantages, choice.low, choice.high)
    return clipped_T | tokens.selected


@register_equation(components.KlCov)
def _kl_cov(choice: components.KlCov, tokens: Tokens) -> Tensor:
    if tokens.selected is None:
        refuse("KL-Cov needs the tokens selected over the whole batch")
    return kl_cov(tokens.log_ratio, tokens.advantages, tokens.selected, choice.coefficient)
