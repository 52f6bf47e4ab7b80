"""From a record of choices to a loss: the only place that dispatches on an algorithm's choices.

A loss is the part of the step's loss that its tokens carry: denominators are counted over the
whole step and given, so the losses of all micro-batches on all ranks add up to the loss of the
step.

Metrics are (total, count) pairs of tensors that add up the same way; divide after adding.

    policy/loss            what is minimised: totals add up to it, counts to 1 over the step's tokens
    policy/surrogate       its terms, counted alike: the surrogate,
    kl/loss                the KL term with its coefficient, where the record has one,
    policy/entropy_loss    the entropy bonus with its coefficient, where the record has one
    policy/kl              KL(old || current), k3: mean of exp(d) - 1 - d, d = log pi - log pi_old
    policy/ratio_mean      mean importance ratio
    policy/clip_fraction   share of tokens whose gradient the clip took away
    policy/ratio_clamped   share of tokens with |d| > 20, whose gradient is zero
    policy/entropy         mean entropy in nats, where entropy is given
    kl/reference           KL(current || reference) in nats a token, k3 whatever the record's
                           estimator is, so that runs compare; where a reference is given
    kl/reference_clamped   share of its tokens beyond k3's limit
    sft/loss, sft/nll      the loss; mean negative log-likelihood of a target token, in nats
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos import advantages as advantage_functions
from rft_algos import kl, reductions, rewards, surrogates
from rft_algos.algorithms import PolicyAlgorithm, Sft
from rft_algos.reductions import Count
from rft_algos.supervised import negative_log_likelihood

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Name to (total [], count []), float64, no gradient. Divide after adding."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a loss gives back.

    Example: two micro-batches with `policy/clip_fraction` (3, 40) and (1, 60) have 4 of 100 tokens
    clipped; their losses are added, not averaged.
    """

    loss: Tensor
    """[] the share of the step's loss that these tokens carry; call `backward` on it."""
    metrics: Metrics


_ADVANTAGES: dict[str, Callable[[PolicyAlgorithm, Tensor, Tensor], Tensor]] = {
    "group_norm": lambda record, rewards_N, group_ids_N: advantage_functions.group_norm(
        rewards_N, group_ids_N, epsilon=record.epsilon
    ),
}
_SURROGATES: dict[str, Callable[[PolicyAlgorithm, Tensor, Tensor], Tensor]] = {
    "ppo_clip": lambda record, log_ratio_T, advantages_T: surrogates.ppo_clip(
        log_ratio_T, advantages_T, record.clip_low, record.clip_high
    ),
}
_CLIPPED: dict[str, Callable[[PolicyAlgorithm, Tensor, Tensor], Tensor]] = {
    "ppo_clip": lambda record, log_ratio_T, advantages_T: surrogates.ppo_clipped(
        log_ratio_T, advantages_T, record.clip_low, record.clip_high
    ),
}
_KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def advantages(record: PolicyAlgorithm, *, rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """Advantages of the sequences of a step, by the record's estimator.

    Args:
        record: the algorithm.
        rewards_N: [N] rewards, already penalised (`penalised_rewards`).
        group_ids_N: [N] int64, equal for the sequences of one prompt.

    Returns:
        [N] float64.
    """
    return _ADVANTAGES[record.advantage](record, rewards_N, group_ids_N)


def penalised_rewards(
    record: PolicyAlgorithm,
    *,
    rewards_N: Tensor,
    logprobs_T: Tensor,
    reference_logprobs_T: Tensor | None,
    loss_mask_T: Tensor,
    sequence_index_T: Tensor,
) -> Tensor:
    """Rewards with the KL penalty, if the record places it there; otherwise the rewards as they are.

    Args:
        record: the algorithm; acts with `kl_place="reward"`.
        rewards_N: [N] rewards.
        logprobs_T: [T] log-probs of the policy that sampled, in nats.
        reference_logprobs_T: [T] log-probs of the reference policy; None where the record needs none.
        loss_mask_T: [T] bool, true at sampled tokens.
        sequence_index_T: [T] int64 in 0..N-1.

    Returns:
        [N] float64.
    """
    if record.kl_place != "reward" or not record.needs_reference:
        return rewards_N.detach().to(torch.float64)
    assert reference_logprobs_T is not None, "a KL penalty in the reward needs reference log-probs"
    kl_T = _KL_ESTIMATORS[record.kl_estimator](logprobs_T - reference_logprobs_T)
    return rewards.kl_penalised(rewards_N, kl_T, loss_mask_T, sequence_index_T, coefficient=record.kl_coef)


def token_weights(
    record: PolicyAlgorithm | Sft,
    *,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    num_loss_tokens: Count,
    num_sequences: Count,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of every token in the loss, by the record's aggregation (`rft_algos.reductions`).

    Args:
        record: the algorithm.
        loss_mask_T: [T] bool.
        segment_ids_T: [T] int64 in 0..T-1, negative at padding.
        num_loss_tokens: loss tokens of the whole step.
        num_sequences: sequences of the whole step.
        dtype: of the weights.

    Returns:
        [T] weights, 0 where masked.
    """
    match record.aggregation:
        case "token_mean":
            return reductions.token_mean(loss_mask_T, num_loss_tokens, dtype=dtype)
        case "sequence_mean_token_mean":
            return reductions.sequence_mean_token_mean(loss_mask_T, segment_ids_T, num_sequences, dtype=dtype)
        case "sequence_mean_token_sum":
            return reductions.sequence_mean_token_sum(loss_mask_T, num_sequences, dtype=dtype)
        case "fixed_length":
            assert record.max_tokens is not None  # the record's constructor sees to it
            return reductions.fixed_length(loss_mask_T, num_sequences, record.max_tokens, dtype=dtype)


def policy_loss(
    record: PolicyAlgorithm,
    *,
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    reference_logprobs_T: Tensor | None,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    entropy_T: Tensor | None,
    num_loss_tokens: Count,
    num_sequences: Count,
) -> LossOutput:
    """loss = sum_t w_t (surrogate_t + kl_coef * kl_t - entropy_coef * entropy_t), and what to watch about it.

    The weights are those of the record's aggregation; the KL term is there with `kl_place="loss"`.
    Whatever stands at masked tokens, NaN included, reaches neither loss, gradient nor metrics.
    Log-ratios are clamped to +-20 before exp (`surrogates.ratio`, `kl.k3`), where the gradient is
    zero. The metrics are in the module's docstring.

    Args:
        record: the algorithm.
        logprobs_T: [T] log-probs of the current policy, in nats; the gradient flows through them.
        old_logprobs_T: [T] those of the policy at the start of the step.
        reference_logprobs_T: [T] those of the reference policy, or None.
        advantages_T: [T] advantages.
        loss_mask_T: [T] bool, true at tokens to learn from.
        segment_ids_T: [T] int64 in 0..T-1, the sequence of each token; negative at padding.
        entropy_T: [T] entropy at each token, in nats, or None; differentiated if `entropy_coef` > 0.
        num_loss_tokens: loss tokens of the whole step, over all micro-batches and ranks.
        num_sequences: sequences of the whole step, likewise.
    """
    _check_lengths(
        logprobs_T=logprobs_T,
        old_logprobs_T=old_logprobs_T,
        reference_logprobs_T=reference_logprobs_T,
        advantages_T=advantages_T,
        loss_mask_T=loss_mask_T,
        segment_ids_T=segment_ids_T,
        entropy_T=entropy_T,
    )
    weights_T = token_weights(
        record,
        loss_mask_T=loss_mask_T,
        segment_ids_T=segment_ids_T,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        dtype=_loss_dtype(logprobs_T),
    )
    tokens = _tokens(logprobs_T, old_logprobs_T, reference_logprobs_T, advantages_T, entropy_T, loss_mask_T)
    terms = {name: reductions.weighted_sum(weights_T, term_T) for name, term_T in _policy_terms(record, tokens).items()}
    loss = torch.stack(list(terms.values())).sum()
    metrics = _term_metrics(terms | {"policy/loss": loss}, loss_mask_T, num_loss_tokens)
    return LossOutput(loss, metrics | _policy_metrics(record, tokens))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """[T] each, 0 where masked, in the type of the loss."""

    log_ratio: Tensor
    advantages: Tensor
    reference_log_ratio: Tensor | None
    entropy: Tensor | None
    mask: Tensor


def _tokens(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    reference_logprobs_T: Tensor | None,
    advantages_T: Tensor,
    entropy_T: Tensor | None,
    loss_mask_T: Tensor,
) -> _Tokens:
    def masked(values_T: Tensor) -> Tensor:
        # before any equation: a gradient of 0 times a slope of NaN would still be NaN
        return torch.where(loss_mask_T, values_T.to(_loss_dtype(logprobs_T)), 0.0)

    current_T = masked(logprobs_T)
    return _Tokens(
        log_ratio=current_T - masked(old_logprobs_T.detach()),
        advantages=masked(advantages_T.detach()),
        reference_log_ratio=None if reference_logprobs_T is None else current_T - masked(reference_logprobs_T.detach()),
        entropy=None if entropy_T is None else masked(entropy_T),
        mask=loss_mask_T,
    )


def _policy_terms(record: PolicyAlgorithm, tokens: _Tokens) -> dict[str, Tensor]:
    """[T] terms of the loss, each with its coefficient, under the name of its metric."""
    terms = {"policy/surrogate": _SURROGATES[record.surrogate](record, tokens.log_ratio, tokens.advantages)}
    if record.kl_place == "loss" and record.needs_reference:
        assert tokens.reference_log_ratio is not None, "a KL term in the loss needs reference log-probs"
        terms["kl/loss"] = record.kl_coef * _KL_ESTIMATORS[record.kl_estimator](tokens.reference_log_ratio)
    if record.needs_entropy:
        assert tokens.entropy is not None, "an entropy bonus needs the entropy of every token"
        terms["policy/entropy_loss"] = -record.entropy_coef * tokens.entropy
    return terms


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
    _check_lengths(logprobs_T=logprobs_T, loss_mask_T=loss_mask_T, segment_ids_T=segment_ids_T)
    dtype = _loss_dtype(logprobs_T)
    weights_T = token_weights(
        record,
        loss_mask_T=loss_mask_T,
        segment_ids_T=segment_ids_T,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        dtype=dtype,
    )
    nll_T = negative_log_likelihood(logprobs_T.to(dtype))
    loss = reductions.weighted_sum(weights_T, nll_T)
    metrics = _term_metrics({"sft/loss": loss}, loss_mask_T, num_loss_tokens)
    metrics["sft/nll"] = _total_and_count(nll_T, loss_mask_T)
    return LossOutput(loss, metrics)


def _check_lengths(**tensors: Tensor | None) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    one_length = len(set(shapes.values())) == 1 and all(len(shape) == 1 for shape in shapes.values())
    assert one_length, f"every argument must have one shape [T]: {shapes}"


def _loss_dtype(logprobs_T: Tensor) -> torch.dtype:
    return torch.promote_types(logprobs_T.dtype, torch.float32)


@torch.no_grad()
def _total_and_count(values_T: Tensor, loss_mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over loss tokens, whatever stands elsewhere, and their number."""
    total = torch.where(loss_mask_T, values_T, 0).sum(dtype=torch.float64)
    return total, loss_mask_T.sum(dtype=torch.float64)


@torch.no_grad()
def _term_metrics(terms: dict[str, Tensor], loss_mask_T: Tensor, num_loss_tokens: Count) -> Metrics:
    """Terms are sums already, so their counts are the share of the step's tokens that is here."""
    num_here = loss_mask_T.sum(dtype=torch.float64)
    share = num_here / torch.as_tensor(num_loss_tokens, device=num_here.device).clamp(min=1)
    return {name: (term.detach().to(torch.float64), share) for name, term in terms.items()}


@torch.no_grad()
def _policy_metrics(record: PolicyAlgorithm, tokens: _Tokens) -> Metrics:
    clipped_T = _CLIPPED[record.surrogate](record, tokens.log_ratio, tokens.advantages)
    values = {
        # k3 of KL(old || current): its log-ratio is log pi_old - log pi
        "policy/kl": kl.k3(-tokens.log_ratio),
        "policy/ratio_mean": surrogates.ratio(tokens.log_ratio),
        "policy/clip_fraction": clipped_T,
        "policy/ratio_clamped": surrogates.is_clamped(tokens.log_ratio),
    }
    if tokens.entropy is not None:
        values["policy/entropy"] = tokens.entropy
    if tokens.reference_log_ratio is not None:
        values["kl/reference"] = kl.k3(tokens.reference_log_ratio)
        values["kl/reference_clamped"] = kl.is_clamped(tokens.reference_log_ratio)
    return {name: _total_and_count(values_T, tokens.mask) for name, values_T in values.items()}
