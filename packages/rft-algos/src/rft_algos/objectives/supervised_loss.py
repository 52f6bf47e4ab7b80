"""The supervised loss of a micro-batch.

sft/loss, sft/nll      the loss; mean negative log-likelihood of a target token, in nats
"""

from __future__ import annotations

from torch import Tensor

from rft_algos.algorithms.published import Sft
from rft_algos.losses import aggregation
from rft_algos.losses.aggregation import Count
from rft_algos.losses.supervised import negative_log_likelihood
from rft_algos.objectives.policy_loss import LossOutput, loss_dtype, term_metrics, total_and_count
from rft_algos.objectives.token_weights import token_weights
from rft_algos.packed.tensor_checks import check_vectors


def supervised_loss(
    record: Sft,
    *,
    logprobs_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    num_loss_tokens: Count,
    num_sequences: Count,
) -> LossOutput:
    """Negative log-likelihood of the target tokens: sum_t w_t (-log pi(token_t)).

    The metrics are in the module's docstring; exp(`sft/nll`) is the perplexity.

    Args:
        record: the aggregation.
        logprobs_T: [T] log-probs of the tokens, in nats; the gradient flows through them.
        loss_mask_T: [T] bool, true at target tokens.
        segment_ids_T: [T] int64 in 0..T-1, the sequence of each token; negative at padding.
        num_loss_tokens: target tokens of the whole step, over all micro-batches and ranks.
        num_sequences: sequences of the whole step, likewise.

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
    nll_T = negative_log_likelihood(logprobs_T.to(dtype))
    loss = aggregation.weighted_sum(weights_T, nll_T)
    metrics = term_metrics({"sft/loss": loss}, loss_mask_T, num_loss_tokens)
    metrics["sft/nll"] = total_and_count(nll_T, loss_mask_T)
    return LossOutput(loss, metrics)
