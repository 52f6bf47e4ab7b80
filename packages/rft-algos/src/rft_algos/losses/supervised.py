"""Supervised fine-tuning: the loss of tokens that someone else wrote."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.input_checks import check_not_negative, refuse
from rft_algos.packed.tensor_checks import check_mask


def negative_log_likelihood(logprobs_T: Tensor) -> Tensor:
    """l_t = -log pi(token_t | earlier tokens): cross-entropy against the token that is there.

    Reduce it with `rft_algos.losses.aggregation`; `objectives.supervised_loss` does both.

    Args:
        logprobs_T: [T] log-probs of the tokens, in nats; the gradient flows through them.

    Returns:
        [T] loss per token, in nats.
    """
    return -logprobs_T


def smoothed_nll(logprobs_T: Tensor, mean_logprobs_T: Tensor, label_smoothing: float) -> Tensor:
    """l_t = -(1 - e) log p_t(y_t) - e (1 / V) sum_v log p_t(v): the target shares e with the whole vocabulary.

    Source: Szegedy et al. 2015 (arXiv 1512.00567), section 7.

    Args:
        logprobs_T: [T] log-probs of the tokens, in nats; the gradient flows through them.
        mean_logprobs_T: [T] mean over the vocabulary of the log-probs, in nats; likewise.
        label_smoothing: e in [0, 1).

    Returns:
        [T] loss per token, in nats.
    """
    if not 0 <= label_smoothing < 1:
        refuse(f"label_smoothing must be in [0, 1), it is {label_smoothing}")
    return (1 - label_smoothing) * negative_log_likelihood(logprobs_T) - label_smoothing * mean_logprobs_T


def cross_entropy(logits_TV: Tensor, targets_T: Tensor, loss_mask_T: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of every token against its target, from logits.

    l_t = -(1 - e) log p_t(target_t) - (e / V) sum_v log p_t(v), p_t = softmax(logits_t), e the label
    smoothing.

    Source of the smoothing: Szegedy et al. 2015 (arXiv 1512.00567), section 7.

    Args:
        logits_TV: [T, V] logits, any floating type; the gradient flows through them. Whatever stands
            in masked rows, NaN included, reaches neither loss nor gradient.
        targets_T: [T] int64 in 0..V-1; anything, such as -100, where masked.
        loss_mask_T: [T] bool, true at tokens to learn from.
        label_smoothing: e in [0, 1), the share of the target that is spread over the vocabulary.

    Returns:
        [T] loss per token, in nats, 0 where masked; float32 (float64 for float64 logits).
    """
    if not 0 <= label_smoothing < 1:
        refuse(f"label_smoothing must be in [0, 1), it is {label_smoothing}")
    if targets_T.shape != loss_mask_T.shape:
        refuse(f"{targets_T.shape} targets for a mask {loss_mask_T.shape}")
    logprobs_TV = torch.log_softmax(_loss_rows(logits_TV, loss_mask_T), dim=1)
    # what stands at masked targets need not be a token id
    targets_T1 = targets_T.masked_fill(~loss_mask_T, 0)[:, None]
    logprobs_T = logprobs_TV.gather(1, targets_T1)[:, 0]
    if label_smoothing > 0:
        loss_T = smoothed_nll(logprobs_T, logprobs_TV.mean(1), label_smoothing)
    else:
        loss_T = negative_log_likelihood(logprobs_T)
    return torch.where(loss_mask_T, loss_T, 0.0)


def log_normaliser(logits_TV: Tensor, loss_mask_T: Tensor) -> Tensor:
    """log Z_t = log sum_v exp(logits_t(v)), what `z_loss` keeps near 0.

    Args:
        logits_TV: [T, V] logits, any floating type; the gradient flows through them. Whatever stands
            in masked rows, NaN included, reaches neither result nor gradient.
        loss_mask_T: [T] bool, true at tokens to learn from.

    Returns:
        [T] in nats, 0 where masked; float32 (float64 for float64 logits).
    """
    return torch.where(loss_mask_T, torch.logsumexp(_loss_rows(logits_TV, loss_mask_T), dim=1), 0.0)


def positive_likelihood(logprobs_T: Tensor, correct_N: Tensor, segment_ids_T: Tensor) -> Tensor:
    """Likelihood of the responses that were right, beside a policy gradient: l_t = -log pi_t if its sequence is right.

    Added with a weight of 0.1 and divided by the loss tokens of right sequences, on the tokens of the rollouts.

    Source: Yue et al. 2025, "VAPO" (arXiv 2504.05118), positive-example language-model loss.

    Args:
        logprobs_T: [T] log-probs of the sampled tokens, in nats; the gradient flows through them.
        correct_N: [N] bool, true for sequences that were right.
        segment_ids_T: [T] int64 in 0..N-1, the sequence of each token; negative at padding, which has loss 0.

    Returns:
        [T] loss per token, 0 in other sequences.
    """
    check_mask(correct_N=correct_N)
    is_right_T = (segment_ids_T >= 0) & correct_N[segment_ids_T.clamp(min=0)]
    return torch.where(is_right_T, -logprobs_T, 0.0)


def z_loss(log_normaliser_T: Tensor, coefficient: float = 1e-4) -> Tensor:
    """Penalty that keeps the softmax normaliser near 1: l_t = coefficient * (log Z_t)^2.

    The cross-entropy does not change when a constant is added to all logits of a token; this term
    does, and stops them from drifting to where low precision loses digits.

    Source: Chowdhery et al. 2022, "PaLM" (arXiv 2204.02311), section 5.

    Args:
        log_normaliser_T: [T] log Z_t, in nats; the gradient flows through it.
        coefficient: weight, 1e-4 in the paper.

    Returns:
        [T] loss per token.
    """
    check_not_negative(coefficient=coefficient)
    return coefficient * log_normaliser_T.square()


def _loss_rows(logits_TV: Tensor, loss_mask_T: Tensor) -> Tensor:
    """The logits in the type of the loss, masked rows replaced by 0: a gradient of 0 times NaN would be NaN."""
    check_mask(loss_mask_T=loss_mask_T)
    if logits_TV.shape[:1] != loss_mask_T.shape:
        refuse(f"logits {logits_TV.shape} for a mask {loss_mask_T.shape}")
    logits_TV = logits_TV.masked_fill(~loss_mask_T[:, None], 0.0)
    return logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
