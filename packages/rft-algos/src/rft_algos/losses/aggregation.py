"""Reductions: what "the mean" over tokens is, as one weight per token.

loss = weighted_sum(weights_T, per_token_T). A weight depends on the token's own sequence and on
denominators counted over the whole optimizer step, on all ranks, before any forward. So the sum
of the losses of all micro-batches on all ranks is the loss of the step, however the batch was
cut, as long as no sequence is cut in two. Who averages gradients over ranks must multiply by the
number of ranks; nothing here knows it.

Masked tokens have weight 0 and whatever stands there, NaN included, reaches neither loss nor
gradient. A denominator of 0 goes with an empty mask and gives weights of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.input_checks import check_positive, refuse
from rft_algos.packed.segments import all_true_on_cpu, broadcast_to_tokens, segment_counts, segment_index
from rft_algos.packed.tensor_checks import check_mask, check_vectors
from rft_algos.packed.tracing import is_traced

Count = int | float | Tensor
"""A global denominator: a number, or a scalar tensor [] as it comes from an all-reduce."""


def on_device_of(like: Tensor, count: Count) -> Tensor:
    """Return a denominator as a scalar tensor [] beside `like`; a number is written there, with no wait for a copy."""
    if isinstance(count, Tensor):
        return count.to(like.device)
    return torch.full((), count, device=like.device)


def token_mean(loss_mask_T: Tensor, num_tokens_global: Count, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every token counts the same: w_t = m_t / (number of loss tokens in the step).

    Source: Yu et al. 2025, "DAPO" (arXiv 2503.14476), equation 8.

    Args:
        loss_mask_T: [T] bool.
        num_tokens_global: loss tokens of the whole step.
        dtype: of the weights.

    Returns:
        [T] weights that add up to 1 over the step.
    """
    return _where_masked(loss_mask_T, _one(loss_mask_T, dtype) / num_tokens_global)


def sequence_mean_token_mean(
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    num_sequences_global: Count,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Every sequence counts the same, whatever its length: w_t = m_t / (L_i * number of sequences).

    L_i is the number of loss tokens of the token's sequence. Long sequences weigh less per token.
    A sequence without loss tokens contributes 0, and counts only if the caller counted it.

    Source: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), equation 3.

    Args:
        loss_mask_T: [T] bool.
        segment_ids_T: [T] int64 in 0..T-1, the sequence of each token within these T tokens;
            negative ids are padding and must be masked. A sequence must lie in one micro-batch.
        num_sequences_global: sequences of the whole step.
        dtype: of the weights.

    Returns:
        [T] weights; those of one sequence add up to 1 / num_sequences_global.
    """
    if segment_ids_T.shape != loss_mask_T.shape:
        refuse(f"{segment_ids_T.shape} against {loss_mask_T.shape}")
    places = segment_index(loss_mask_T, segment_ids_T)
    lengths_S = segment_counts(places, dtype=dtype)
    # empty slots divide by 0, and no token reads them
    return broadcast_to_tokens(_one(loss_mask_T, dtype) / (lengths_S * num_sequences_global), places)


def sequence_mean_token_sum(
    loss_mask_T: Tensor, num_sequences_global: Count, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Mean over sequences of the sum over tokens: w_t = m_t / (number of sequences).

    The policy-gradient theorem as it stands: the log-prob of a sequence is the sum over its tokens.

    Args:
        loss_mask_T: [T] bool.
        num_sequences_global: sequences of the whole step.
        dtype: of the weights.

    Returns:
        [T] weights; they add up to the mean number of loss tokens of a sequence.
    """
    return _where_masked(loss_mask_T, _one(loss_mask_T, dtype) / num_sequences_global)


def token_sum(loss_mask_T: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The plain sum over tokens: w_t = m_t.

    The gradient grows with the number of tokens of the step, so that a learning rate belongs to one batch size.

    Args:
        loss_mask_T: [T] bool.
        dtype: of the weights.

    Returns:
        [T] weights of 0 and 1.
    """
    return _where_masked(loss_mask_T, _one(loss_mask_T, dtype))


def prompt_mean_token_mean(
    loss_mask_T: Tensor, prompt_lengths_T: Tensor, num_prompts_global: Count, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Every prompt counts the same, and within it every token: w_t = m_t / (L_g * number of prompts).

    L_g is the number of loss tokens of all responses to the token's prompt, in the whole step; so the responses to one
    prompt may lie in several micro-batches and on several ranks.

    Source: Khatri et al. 2025, "The art of scaling reinforcement learning compute for LLMs" (ScaleRL, arXiv
    2510.13786), prompt-level loss aggregation.

    Args:
        loss_mask_T: [T] bool.
        prompt_lengths_T: [T] L_g at each token; ignored where masked.
        num_prompts_global: prompts of the whole step that have a loss token.
        dtype: of the weights.

    Returns:
        [T] weights; those of one prompt add up to 1 / num_prompts_global.
    """
    check_mask(loss_mask_T=loss_mask_T)
    check_vectors(loss_mask_T=loss_mask_T, prompt_lengths_T=prompt_lengths_T)
    lengths_T = prompt_lengths_T.to(dtype).clamp(min=1)
    return torch.where(loss_mask_T, _one(loss_mask_T, dtype) / (lengths_T * num_prompts_global), 0.0)


def fixed_length(
    loss_mask_T: Tensor,
    num_sequences_global: Count,
    max_tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sum over tokens, divided by one constant length: w_t = m_t / (number of sequences * max_tokens).

    `max_tokens` is a setting (the largest response length), never the width of a batch, because
    the result would then depend on what else was in the batch.

    Source: Liu et al. 2025, "Understanding R1-Zero-like training" (Dr. GRPO, arXiv 2503.20783).

    Args:
        loss_mask_T: [T] bool.
        num_sequences_global: sequences of the whole step.
        max_tokens: the constant length, in tokens.
        dtype: of the weights.

    Returns:
        [T] weights.
    """
    check_positive(max_tokens=max_tokens)
    return _where_masked(loss_mask_T, _one(loss_mask_T, dtype) / num_sequences_global / max_tokens)


def weighted_sum(weights_T: Tensor, values_T: Tensor) -> Tensor:
    """sum_t w_t v_t over the tokens of non-zero weight.

    A value of weight zero may be NaN or infinite: it is replaced before the product, so that
    neither the sum nor the gradient of `values_T` sees it (0 * NaN would be NaN).

    Args:
        weights_T: [T] weights.
        values_T: [T] values, the gradient flows through them.

    Returns:
        [] sum, in the wider of the two types.
    """
    if weights_T.shape != values_T.shape:
        refuse(f"weights {weights_T.shape} against values {values_T.shape}")
    if values_T.is_cpu and not is_traced():
        total = (weights_T * values_T).sum()
        if total.isfinite():  # so was every value, and there was nothing to replace
            return total
    return (weights_T * torch.where(weights_T != 0, values_T, 0.0)).sum()


def _one(loss_mask_T: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ones(1, dtype=dtype, device=loss_mask_T.device)


def _where_masked(loss_mask_T: Tensor, weight_1: Tensor) -> Tensor:
    check_mask(loss_mask_T=loss_mask_T)
    if all_true_on_cpu(loss_mask_T):
        # a view of one number, which takes no memory
        return weight_1.expand(loss_mask_T.shape)
    return torch.where(loss_mask_T, weight_1, 0.0)
