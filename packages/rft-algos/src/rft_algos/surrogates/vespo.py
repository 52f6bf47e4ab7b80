"""Surrogates that weigh whole sequences without clipping: VESPO and tapered off-policy REINFORCE (TOPR)."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.registry import register_equation
from rft_algos.input_checks import check_not_negative
from rft_algos.packed.importance_ratio import LOG_RATIO_LIMIT
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.packed.segments import broadcast_to_tokens, segment_index, segment_means, segment_sums


def vespo(
    logprobs_T: Tensor,
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    """Variational sequence-level soft policy optimisation, as a loss.

    l_t = -sg[phi(w_i)] A_t log pi_t,  phi(w) = w^k exp(lambda (1 - w)),

    w_i the product of the ratios over the loss tokens of sequence i, with (k, lambda) = `positive` where the mean of
    its advantages is above 0 and `negative` elsewhere. phi is 1 at w = 1, and 0 far on either side: a soft window on
    whole sequences, without length normalisation and without a clip.

    Source: Shen et al. 2026, "VESPO" (arXiv 2602.10693), the deployed kernel; the numbers are those of TRL's `vespo`.

    Args:
        logprobs_T: [T] log pi of the sampled tokens, in nats; the gradient flows through it alone.
        log_ratio_T: [T] log pi - log pi_old, in nats.
        advantages_T: [T] advantages, no gradient.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches no other token.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        positive: k and lambda of sequences with positive advantage, 0 or more.
        negative: k and lambda of the others, 0 or more.

    Returns:
        [T] loss per token. Its value means nothing; at the old policy its gradient is -A_t.
    """
    check_not_negative(k_positive=positive[0], lambda_positive=positive[1])
    check_not_negative(k_negative=negative[0], lambda_negative=negative[1])
    places = segment_index(loss_mask_T, segment_ids_T)
    log_w_S = segment_sums(log_ratio_T.detach(), places).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    is_good_S = segment_means(advantages_T, places) > 0
    # numbers as tensors of the ratios' type: two plain floats would make float32 ones
    k_S = torch.where(is_good_S, log_w_S.new_full((), positive[0]), log_w_S.new_full((), negative[0]))
    lambda_S = torch.where(is_good_S, log_w_S.new_full((), positive[1]), log_w_S.new_full((), negative[1]))
    weights_S = (k_S * log_w_S - lambda_S * torch.expm1(log_w_S)).exp()
    return broadcast_to_tokens(weights_S, places) * -advantages_T * logprobs_T


def topr(
    logprobs_T: Tensor,
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
) -> Tensor:
    """Tapered off-policy REINFORCE, as a loss.

    l_t = -A_t log pi_t where the mean advantage of the sequence is above 0,
    l_t = -sg[min(w_i, 1)] A_t log pi_t elsewhere, w_i the product of its ratios over the loss tokens.

    Good responses are learned as in supervised training, however far the policy is from the one that sampled them; bad
    ones are pushed down only as long as the policy may still say them, which keeps the loss bounded from below.

    Source: Le Roux et al. 2025, "Tapered off-policy REINFORCE" (arXiv 2503.14286), the canonical setting: no bound on
    good ones, [0, 1] on bad ones.

    Args:
        logprobs_T: [T] log pi of the sampled tokens, in nats; the gradient flows through it alone.
        log_ratio_T: [T] log pi - log pi of the policy that sampled, in nats.
        advantages_T: [T] advantages, no gradient.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches no other token.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.

    Returns:
        [T] loss per token. Its value means nothing; at the old policy its gradient is -A_t.
    """
    places = segment_index(loss_mask_T, segment_ids_T)
    tapered_S = segment_sums(log_ratio_T.detach(), places).clamp(-LOG_RATIO_LIMIT, 0.0).exp()
    weights_S = torch.where(segment_means(advantages_T, places) > 0, torch.ones_like(tapered_S), tapered_S)
    return broadcast_to_tokens(weights_S, places) * -advantages_T * logprobs_T


@register_equation(components.Vespo)
def _vespo(choice: components.Vespo, tokens: Tokens) -> Tensor:
    return vespo(
        tokens.logprobs,
        tokens.log_ratio,
        tokens.advantages,
        tokens.mask,
        tokens.segment_ids,
        positive=(choice.k_positive, choice.lambda_positive),
        negative=(choice.k_negative, choice.lambda_negative),
    )


@register_equation(components.Topr)
def _topr(choice: components.Topr, tokens: Tokens) -> Tensor:
    return topr(tokens.logprobs, tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids)
