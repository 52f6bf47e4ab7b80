"""The supervised loss of a micro-batch.

sft/loss, sft/nll      the loss; mean negative log-likelihood of a target token, in nats
sft/z_loss             mean penalty on the normaliser, where it has a weight
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos.algorithms.published import Sft
from rft_algos.input_checks import refuse
from rft_algos.losses import aggregation
from rft_algos.losses.aggregation import Count
from rft_algos.losses.supervised import negative_log_likelihood, smoothed_nll, z_loss
from rft_algos.objectives.policy_loss import LossOutput, Metrics, loss_dtype, term_metrics, total_and_count
from rft_algos.objectives.token_weights import token_weights
from rft_algos.packed.tensor_checks import check_vectors


@dataclass(frozen=True, slots=True)
class VocabularyTerms:
    """Values of each token's whole distribution, which terms over the vocabulary need."""

    mean_logprobs_T: Tensor | None = None
    """[T] mean over the vocabulary of the log-probs; needed for label smoothing."""
    log_normaliser_T: Tensor | None = None
    """[T] log Z_t; needed for the z-loss."""


_NO_TERMS = VocabularyTerms()


def supervised_loss(
    record: Sft,
    *,
    logprobs_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    num_loss_tokens: Count,
    num_sequences: Count,
    row_weights_T: Tensor | None = None,
    vocabulary: VocabularyTerms = _NO_TERMS,
) -> LossOutput:
    """Negative log-likelihood of the target tokens: sum_t w_t (-log pi(token_t)).

    With label smoothing e and a z-loss of coefficient c: sum_t w_t (-(1 - e) log pi(token_t)
    - (e / V) sum_v log pi(v) + c (log Z_t)^2). With row weights r, w_t = r_t / (sum over the step of r_t).

    The metrics are in the module's docstring; exp(`sft/nll`) is the perplexity.

    Args:
        record: the aggregation.
        logprobs_T: [T] log-probs of the tokens, in nats; the gradient flows through them.
        loss_mask_T: [T] bool, true at target tokens.
        segment_ids_T: [T] int64 in 0..T-1, the sequence of each token; negative at padding.
        num_loss_tokens: target tokens of the whole step, over all micro-batches and ranks; with `row_weights_T` the
            sum of their weights.
        num_sequences: sequences of the whole step, likewise.
        row_weights_T: [T] weight of each token's row; None = all are 1. With the aggregation "token_mean" alone.
        vocabulary: what the terms over the vocabulary need.

    Returns:
        The loss and the metrics.
    """
    check_vectors(logprobs_T=logprobs_T, loss_mask_T=loss_mask_T, segment_ids_T=segment_ids_T)
    dtype = loss_dtype(logprobs_T)
    weights_T = token_weights(
        record,
        loss_mask_T=loss_mask_T,
        segment_ids_T=segment_ids_T,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        dtype=dtype,
    )
    if row_weights_T is not None:
        if record.aggregation != "token_mean":
            refuse(f"row weights need the aggregation token_mean, it is {record.aggregation}")
        weights_T = weights_T * row_weights_T.to(dtype)
    nll_T = negative_log_likelihood(logprobs_T.to(dtype))
    metrics: Metrics = {"sft/nll": total_and_count(nll_T, loss_mask_T)}
    losses_T = nll_T
    if record.label_smoothing:
        mean_T = _needed(vocabulary.mean_logprobs_T, "mean_logprobs_T", "label_smoothing")
        losses_T = smoothed_nll(logprobs_T.to(dtype), mean_T.to(dtype), record.label_smoothing)
    if record.z_loss_coef:
        z_T = z_loss(
            _needed(vocabulary.log_normaliser_T, "log_normaliser_T", "z_loss_coef").to(dtype), record.z_loss_coef
        )
        losses_T = losses_T + z_T
        metrics["sft/z_loss"] = total_and_count(z_T, loss_mask_T)
    loss = aggregation.weighted_sum(weights_T, losses_T)
    if row_weights_T is None:
        metrics |= term_metrics({"sft/loss": loss}, loss_mask_T, num_loss_tokens)
    else:  # the weights of a step add up to 1: those that are here are the share of the step that is here
        metrics["sft/loss"] = (loss.detach().to(torch.float64), weights_T.detach().sum(dtype=torch.float64))
    return LossOutput(loss, metrics)


def _needed(values_T: Tensor | None, name: str, term: str) -> Tensor:
    if values_T is None:
        refuse(f"{term} needs {name}")
    return values_T
