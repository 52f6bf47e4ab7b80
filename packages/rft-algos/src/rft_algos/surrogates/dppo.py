"""Divergence Proximal Policy Optimization: a trust region on probabilities instead of on their ratio.

A ratio of 2 is harmless at a probability of 1e-6 and enormous at 0.4. These surrogates compare
the sampled token against all others (a binary distribution: p and 1 - p) by total variation or by
KL divergence, and drop a token only if it has left the region and would go further.

The old policy is the one that sampled, or its recomputation; the authors anchor on the former.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.registry import register_equation
from rft_algos.input_checks import check_positive, refuse
from rft_algos.packed.importance_ratio import ratio
from rft_algos.packed.loss_tokens import Tokens

Divergence = Literal["tv", "kl"]
"""Total variation, or the KL divergence of the old from the current policy."""
_KL_EPSILON = 1e-8
"""Added to 1 - p on both sides, as in the authors' code: float32 log-probs of 0 (p = 1) are common."""


def dppo_tv(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    limit_low: float,
    limit_high: float,
    max_ratio: float = 20.0,
) -> Tensor:
    """DPPO with the total variation of the sampled token, as a loss.

    l_t = -m_t A_t sg[min(r_t, max_ratio)] log pi_t, m_t = `dppo_tv_kept`.

    Source: Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879).

    Args:
        logprobs_T: [T] log pi of the sampled tokens, in nats; the gradient flows through it alone.
        old_logprobs_T: [T] log pi_old of the same tokens, in nats.
        advantages_T: [T] advantages, no gradient.
        limit_low: how far the probability may fall, in (0, 1].
        limit_high: how far the probability may rise, in (0, 1].
        max_ratio: largest importance weight.

    Returns:
        [T] loss per token. Its value means nothing; at the old policy its gradient is -A_t.
    """
    check_positive(limit_low=limit_low, limit_high=limit_high, max_ratio=max_ratio)
    kept_T = dppo_tv_kept(logprobs_T, old_logprobs_T, advantages_T, limit_low, limit_high)
    return _weighted(logprobs_T, old_logprobs_T, advantages_T, kept_T, max_ratio)


def dppo_tv_kept(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, limit_low: float, limit_high: float
) -> Tensor:
    """Mask the tokens that `dppo_tv` keeps.

    m_t = pi_t - pi_old,t <= limit_high where A_t > 0, pi_t - pi_old,t >= -limit_low elsewhere.

    Args:
        logprobs_T: [T] log pi, in nats.
        old_logprobs_T: [T] log pi_old, in nats.
        advantages_T: [T] advantages.
        limit_low: as in `dppo_tv`.
        limit_high: as in `dppo_tv`.

    Returns:
        [T] bool.
    """
    moved_T = logprobs_T.exp() - old_logprobs_T.exp()
    return torch.where(advantages_T > 0, moved_T <= limit_high, moved_T >= -limit_low)


def dppo_kl(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    limit_low: float,
    limit_high: float,
    max_ratio: float = 20.0,
) -> Tensor:
    """DPPO with the binary KL divergence of the sampled token, as a loss.

    l_t = -m_t A_t sg[min(r_t, max_ratio)] log pi_t, m_t = `dppo_kl_kept`.

    Source: Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879).

    Args:
        logprobs_T: [T] log pi of the sampled tokens, in nats; the gradient flows through it alone.
        old_logprobs_T: [T] log pi_old of the same tokens, in nats.
        advantages_T: [T] advantages, no gradient.
        limit_low: largest divergence of a token whose probability has fallen, in nats.
        limit_high: largest divergence of a token whose probability has risen, in nats.
        max_ratio: largest importance weight.

    Returns:
        [T] loss per token. Its value means nothing; at the old policy its gradient is -A_t.
    """
    check_positive(limit_low=limit_low, limit_high=limit_high, max_ratio=max_ratio)
    kept_T = dppo_kl_kept(logprobs_T, old_logprobs_T, advantages_T, limit_low, limit_high)
    return _weighted(logprobs_T, old_logprobs_T, advantages_T, kept_T, max_ratio)


def dppo_kl_kept(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, limit_low: float, limit_high: float
) -> Tensor:
    """Mask the tokens that `dppo_kl` keeps: those within the region, and those on their way back.

    m_t = not (D_t > limit_high and pi_t > pi_old,t) where A_t > 0,
    m_t = not (D_t > limit_low and pi_t < pi_old,t) elsewhere,
    D_t = p log(p / q) + (1 - p) log((1 - p) / (1 - q)), p = pi_old,t, q = pi_t.

    Args:
        logprobs_T: [T] log pi, in nats.
        old_logprobs_T: [T] log pi_old, in nats.
        advantages_T: [T] advantages.
        limit_low: as in `dppo_kl`.
        limit_high: as in `dppo_kl`.

    Returns:
        [T] bool.
    """
    moved_T = logprobs_T - old_logprobs_T
    divergence_T = _binary_kl(old_logprobs_T, logprobs_T)
    too_high = (divergence_T > limit_high) & (moved_T > 0)
    too_low = (divergence_T > limit_low) & (moved_T < 0)
    return ~torch.where(advantages_T > 0, too_high, too_low)


def top_k_divergence(old_logprobs_TK: Tensor, logprobs_TK: Tensor, *, divergence: Divergence = "tv") -> Tensor:
    """Divergence of two distributions over K tokens and one remainder, for DPPO with more than the sampled token.

    TV: D_t = (sum_k |p_k - q_k| + |p_rest - q_rest|) / 2,
    KL: D_t = sum_k p_k log(p_k / q_k) + p_rest log(p_rest / q_rest),
    p the old and q the current policy, rest = 1 - the sum over the K tokens. With K = 1, the sampled token, they are
    the binary divergences of `dppo_tv` and `dppo_kl`; merging tokens never makes a divergence larger.

    Source: Qi et al. 2026 (arXiv 2602.04879), the top-K approximation.

    Args:
        old_logprobs_TK: [T, K] log p of K different tokens a row, the sampled one among them, in nats.
        logprobs_TK: [T, K] log q of the same tokens.
        divergence: "tv" or "kl".

    Returns:
        [T] divergence, no gradient; total variation in [0, 1], KL in nats.
    """
    if old_logprobs_TK.ndim != 2 or old_logprobs_TK.shape != logprobs_TK.shape:
        refuse(f"both must be [T, K]: {tuple(old_logprobs_TK.shape)} and {tuple(logprobs_TK.shape)}")
    if divergence not in get_args(Divergence):
        refuse(f"divergence must be one of {', '.join(get_args(Divergence))}, it is {divergence!r}")
    old_TK, new_TK = old_logprobs_TK.detach(), logprobs_TK.detach()
    p_TK, q_TK = old_TK.exp(), new_TK.exp()
    rest_p_T, rest_q_T = (1 - p_TK.sum(1)).clamp(min=0), (1 - q_TK.sum(1)).clamp(min=0)
    if divergence == "tv":
        return ((p_TK - q_TK).abs().sum(1) + (rest_p_T - rest_q_T).abs()) / 2
    own_TK = torch.where(p_TK > 0, p_TK * (old_TK - new_TK), 0.0)
    return own_TK.sum(1) + rest_p_T * ((rest_p_T + _KL_EPSILON) / (rest_q_T + _KL_EPSILON)).log()


def dppo_top_k(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    divergences_T: Tensor,
    limit_low: float,
    limit_high: float,
    max_ratio: float = 20.0,
) -> Tensor:
    """DPPO with a divergence that was computed over more than the sampled token, as a loss.

    l_t = -m_t A_t sg[min(r_t, max_ratio)] log pi_t, m_t = 0 where D_t > limit_high, r_t > 1 and A_t > 0, or
    D_t > limit_low, r_t < 1 and A_t < 0; 1 elsewhere.

    Source: Qi et al. 2026 (arXiv 2602.04879).

    Args:
        logprobs_T: [T] log pi of the sampled tokens, in nats; the gradient flows through it alone.
        old_logprobs_T: [T] log pi_old of the same tokens, in nats.
        advantages_T: [T] advantages, no gradient.
        divergences_T: [T] from `top_k_divergence`.
        limit_low: largest divergence of a token whose probability has fallen.
        limit_high: largest divergence of a token whose probability has risen.
        max_ratio: largest importance weight.

    Returns:
        [T] loss per token. Its value means nothing; at the old policy its gradient is -A_t.
    """
    check_positive(limit_low=limit_low, limit_high=limit_high, max_ratio=max_ratio)
    moved_T, divergences_T = logprobs_T.detach() - old_logprobs_T.detach(), divergences_T.detach()
    too_high = (advantages_T > 0) & (moved_T > 0) & (divergences_T > limit_high)
    too_low = (advantages_T < 0) & (moved_T < 0) & (divergences_T > limit_low)
    return _weighted(logprobs_T, old_logprobs_T, advantages_T, ~(too_high | too_low), max_ratio)


def _binary_kl(log_p_T: Tensor, log_q_T: Tensor) -> Tensor:
    others_p_T, others_q_T = -torch.expm1(log_p_T), -torch.expm1(log_q_T)  # 1 - p without losing digits near p = 1
    others_T = others_p_T * ((others_p_T + _KL_EPSILON) / (others_q_T + _KL_EPSILON)).log()
    return log_p_T.exp() * (log_p_T - log_q_T) + others_T


def _weighted(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, kept_T: Tensor, max_ratio: float
) -> Tensor:
    weights_T = ratio(logprobs_T.detach() - old_logprobs_T.detach()).clamp(max=max_ratio)
    return torch.where(kept_T, weights_T * -advantages_T, 0.0) * logprobs_T


@register_equation(components.Dppo)
def _dppo(choice: components.Dppo, tokens: Tokens) -> Tensor:
    equation = dppo_tv if choice.divergence == "tv" else dppo_kl
    return equation(tokens.logprobs, tokens.old_logprobs, tokens.advantages, choice.low, choice.high, choice.max_ratio)
