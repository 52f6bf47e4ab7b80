"""The policy loss of a micro-batch.

A loss is the part of the step's loss that its tokens carry: denominators are counted over the
whole step and given, so the losses of all micro-batches on all ranks add up to the loss of the
step.

Metrics are (total, count) pairs of tensors that add up the same way; divide after adding.

    policy/loss            what is minimised: totals add up to it, counts to 1 over the step's tokens
    policy/surrogate       its terms, counted alike: the surrogate,
    kl/loss                the KL term with its coefficient, where the record has one,
    policy/drift_loss      the drift term with its coefficient, where the record has one,
    policy/entropy_loss    the entropy bonus with its coefficient, where the record has one
    policy/kl              KL(old || current), k3: mean of exp(d) - 1 - d, d = log pi - log pi_old
    policy/ratio_mean      mean importance ratio
    policy/clip_fraction   share of tokens whose gradient the clip took away, where the surrogate clips
    policy/ratio_clamped   share of tokens with |d| > 20, whose gradient is zero
    policy/off_policy_kept share of tokens that the off-policy sequence mask kept, where the record has one
    policy/entropy         mean entropy in nats, where entropy is given
    kl/reference           KL(current || reference) in nats a token, k3 whatever the record's
                           estimator is, so that runs compare; where a reference is given
    kl/reference_clamped   share of its tokens beyond k3's limit
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos import surrogates
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.algorithms.registry import clip_indicator_of, equation_of
from rft_algos.input_checks import refuse
from rft_algos.losses import aggregation, kl, off_policy
from rft_algos.losses.aggregation import Count, on_device_of
from rft_algos.objectives.token_weights import token_weights
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.packed.segments import all_true_on_cpu
from rft_algos.packed.tensor_checks import check_vectors
from rft_algos.packed.tracing import is_traced

_LEAST_EXCESS = math.expm1(-surrogates.LOG_RATIO_LIMIT)
"""Of the ratio over 1."""
_PART = 65_536
"""Tokens that are added up together: their float64 copy stays in the cache."""
Metrics = dict[str, tuple[Tensor, Tensor]]
"""Name to (total [], count []), float64, no gradient. Divide after adding."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Outputs of a policy loss.

    Example: two micro-batches with `policy/clip_fraction` (3, 40) and (1, 60) have 4 of 100 tokens
    clipped; their losses are added, not averaged.
    """

    loss: Tensor
    """[] the share of the step's loss that these tokens carry; call `backward` on it."""
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Weights of the terms besides the surrogate, as a controller may have moved them since the start."""

    kl: float
    drift: float
    entropy: float

    @classmethod
    def of(cls, record: PolicyAlgorithm) -> Coefficients:
        """Those of the record itself (no tensors).

        Args:
            record: the algorithm.

        Returns:
            Its coefficients.
        """
        return cls(kl=record.kl_coef, drift=record.drift_coef, entropy=record.entropy_coef)


def policy_loss(
    record: PolicyAlgorithm,
    *,
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    num_loss_tokens: Count,
    num_sequences: Count,
    reference_logprobs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    behaviour_logprobs_T: Tensor | None = None,
    token_weights_T: Tensor | None = None,
    selected_T: Tensor | None = None,
    coefficients: Coefficients | None = None,
) -> LossOutput:
    """loss = sum_t w_t (c_t surrogate_t + kl_coef * kl_t + drift_coef * drift_t - entropy_coef * entropy_t).

    w_t are the weights of the record's aggregation, c_t those of the correction and of the selection
    of tokens (`compute_advantages`), which leave the denominators as they are; the KL term is there with
    `kl_place="loss"`. Whatever stands at masked tokens, NaN included, reaches neither loss, gradient
    nor metrics. Log-ratios are clamped to +-20 before exp (`surrogates.ratio`, `kl.k3`), where the
    gradient is zero. The metrics are in the module's docstring.

    Args:
        record: the algorithm.
        logprobs_T: [T] log-probs of the current policy, in nats; the gradient flows through them.
        old_logprobs_T: [T] those of the policy at the start of the step.
        reference_logprobs_T: [T] those of the reference policy, or None.
        advantages_T: [T] advantage of each token, that of its sequence where rewards are for outcomes.
        loss_mask_T: [T] bool, true at sampled tokens.
        segment_ids_T: [T] int64 in 0..T-1, the sequence of each token; negative at padding.
        entropy_T: [T] entropy of the policy at each token in nats, or None; with gradient where the record has a bonus.
        num_loss_tokens: loss tokens of the whole step, over all micro-batches and ranks.
        num_sequences: sequences of the whole step, likewise.
        behaviour_logprobs_T: [T] those of the engine that sampled; needed where the record masks off-policy sequences.
        token_weights_T: [T] c_t of `compute_advantages`; None for 1 everywhere.
        selected_T: [T] bool, tokens that a selective surrogate selected over the whole batch (`compute_advantages`).
        coefficients: as controllers have them now; None for the record's own.

    Returns:
        The loss and the metrics.
    """
    optional = {
        "reference_logprobs_T": reference_logprobs_T,
        "entropy_T": entropy_T,
        "behaviour_logprobs_T": behaviour_logprobs_T,
        "token_weights_T": token_weights_T,
        "selected_T": selected_T,
    }
    check_vectors(
        logprobs_T=logprobs_T,
        old_logprobs_T=old_logprobs_T,
        advantages_T=advantages_T,
        loss_mask_T=loss_mask_T,
        segment_ids_T=segment_ids_T,
        **optional,
    )
    tokens = Tokens.masked(
        logprobs_T=logprobs_T,
        old_logprobs_T=old_logprobs_T,
        advantages_T=advantages_T,
        loss_mask_T=loss_mask_T,
        segment_ids_T=segment_ids_T,
        dtype=loss_dtype(logprobs_T),
        **optional,
    )
    weights_T = token_weights(
        record,
        loss_mask_T=loss_mask_T,
        segment_ids_T=segment_ids_T,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        dtype=loss_dtype(logprobs_T),
    )
    kept_T = _off_policy_kept(record, tokens)
    values = _policy_terms(record, tokens, kept_T, coefficients or Coefficients.of(record))
    # each term is reduced by itself, so that the metrics add up to the loss
    terms = {name: aggregation.weighted_sum(weights_T, term_T) for name, term_T in values.items()}
    loss = torch.stack(list(terms.values())).sum()
    metrics = term_metrics(terms | {"policy/loss": loss}, loss_mask_T, num_loss_tokens)
    return LossOutput(loss, metrics | _policy_metrics(record, tokens, kept_T))


def is_by_token(record: PolicyAlgorithm) -> bool:
    """Return whether the loss of a token depends on that token's own log-prob and entropy alone (`token_losses`).

    Args:
        record: the algorithm.

    Returns:
        False where a ratio or a mask is that of a whole sequence.
    """
    return not record.surrogate.by_sequence and record.off_policy_delta is None


def token_losses(
    record: PolicyAlgorithm,
    *,
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    reference_logprobs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    token_weights_T: Tensor | None = None,
    selected_T: Tensor | None = None,
    coefficients: Coefficients | None = None,
) -> Tensor:
    """The terms of `policy_loss` for some of the loss tokens, each with its weight: their sum is the loss.

    For records of which `is_by_token` holds; the tokens may be any, in any order, and come from any sequences.

    Args:
        record: the algorithm.
        logprobs_T: [T] log-probs of the current policy, in nats; the gradient flows through them.
        old_logprobs_T: [T] those of the policy at the start of the step.
        reference_logprobs_T: [T] those of the reference policy, or None.
        advantages_T: [T] advantage of each token.
        weights_T: [T] weight of each token in the loss (`token_weights`).
        entropy_T: [T] entropy of the policy at each token in nats, or None; with gradient where there is a bonus.
        token_weights_T: [T] c_t of `compute_advantages`; None for 1 everywhere.
        selected_T: [T] bool, tokens that a selective surrogate selected over the whole batch (`compute_advantages`).
        coefficients: as controllers have them now; None for the record's own.

    Returns:
        [T] losses.
    """
    if not is_by_token(record):
        refuse(f"the loss of {type(record).__name__} is not one of tokens")
    tokens = Tokens.masked(
        logprobs_T=logprobs_T,
        old_logprobs_T=old_logprobs_T,
        advantages_T=advantages_T,
        # all are loss tokens, and no equation that gets here looks at sequences
        loss_mask_T=torch.ones_like(logprobs_T, dtype=torch.bool),
        segment_ids_T=torch.zeros_like(logprobs_T, dtype=torch.int64),
        dtype=loss_dtype(logprobs_T),
        reference_logprobs_T=reference_logprobs_T,
        entropy_T=entropy_T,
        token_weights_T=token_weights_T,
        selected_T=selected_T,
    )
    values = _policy_terms(record, tokens, None, coefficients or Coefficients.of(record))
    total_T = torch.stack(list(values.values())).sum(0)
    # where the weight is 0, the term may be NaN
    return torch.where(weights_T != 0, total_T, 0.0) * weights_T.to(total_T.dtype)


def _off_policy_kept(record: PolicyAlgorithm, tokens: Tokens) -> Tensor | None:
    if record.off_policy_delta is None:
        return None
    if tokens.behaviour_logprobs is None:
        refuse("the off-policy mask needs the engine's log-probs")
    # of the current policy, so each update of the step decides anew
    fallen_T = tokens.behaviour_logprobs - tokens.logprobs.detach()
    return off_policy.off_policy_sequence_mask(
        fallen_T, tokens.advantages, tokens.mask, tokens.segment_ids, record.off_policy_delta
    )


def _policy_terms(
    record: PolicyAlgorithm, tokens: Tokens, kept_T: Tensor | None, coefficients: Coefficients
) -> dict[str, Tensor]:
    """[T] terms of the loss, each with its coefficient, under the name of its metric."""
    surrogate_T = equation_of(record.surrogate)(record.surrogate, tokens)
    # corrections belong to the surrogate: the terms below are about the policy that is trained
    for weight_T in (tokens.weights, kept_T):
        surrogate_T = surrogate_T if weight_T is None else surrogate_T * weight_T
    terms = {"policy/surrogate": surrogate_T}
    if record.kl_place == "loss" and record.needs_reference:
        if tokens.reference_log_ratio is None:
            refuse(
                "a KL term in the loss needs reference log-probs: there are none", do='kl_place="none" in the record'
            )
        terms["kl/loss"] = coefficients.kl * kl.estimates(
            record.kl_estimator, tokens.reference_log_ratio, tokens.log_ratio
        )
    if record.drift_coef > 0:
        terms["policy/drift_loss"] = coefficients.drift * surrogates.policy_drift(tokens.log_ratio)
    if record.needs_entropy:
        if tokens.entropy is None:
            refuse("an entropy bonus needs the entropy of every token")
        terms["policy/entropy_loss"] = -coefficients.entropy * tokens.entropy
    return terms


def loss_dtype(logprobs_T: Tensor) -> torch.dtype:
    """The type that a loss is computed in: float32, or float64 where the log-probs are.

    Args:
        logprobs_T: [T] log-probs.

    Returns:
        The type.
    """
    return torch.promote_types(logprobs_T.dtype, torch.float32)


@torch.no_grad()
def total_and_count(values_T: Tensor, loss_mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over loss tokens, whatever stands elsewhere, and their number.

    Args:
        values_T: [T] values.
        loss_mask_T: [T] bool.

    Returns:
        Two float64 scalars [].
    """
    return _total(values_T, loss_mask_T), _number(loss_mask_T)


def _total(values_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    if values_T.dtype == torch.bool:
        return _number(values_T & loss_mask_T)
    nothing_masked = all_true_on_cpu(loss_mask_T)
    return _sum(values_T if nothing_masked else torch.where(loss_mask_T, values_T, 0))


def _sum(values_T: Tensor) -> Tensor:
    if is_traced() or not values_T.is_cpu:
        return values_T.sum(dtype=torch.float64)
    # part by part, because on a CPU the sum would first make a float64 copy of all
    return torch.stack([part.sum(dtype=torch.float64) for part in torch.split(values_T, _PART)]).sum()


def _number(mask_T: Tensor) -> Tensor:
    if all_true_on_cpu(mask_T):
        return torch.tensor(mask_T.numel(), dtype=torch.float64)
    return mask_T.count_nonzero().to(torch.float64)  # a third of the time of `sum`


@torch.no_grad()
def term_metrics(terms: dict[str, Tensor], loss_mask_T: Tensor, num_loss_tokens: Count) -> Metrics:
    """Terms are sums already, so their counts are the share of the step's tokens that is here.

    Args:
        terms: [] each, by the name of its metric.
        loss_mask_T: [T] bool.
        num_loss_tokens: loss tokens of the whole step.

    Returns:
        (total [], count []) by name.
    """
    num_here = _number(loss_mask_T)
    share = num_here / on_device_of(num_here, num_loss_tokens).clamp(min=1)
    return {name: (term.detach().to(torch.float64), share) for name, term in terms.items()}


@torch.no_grad()
def _policy_metrics(record: PolicyAlgorithm, tokens: Tokens, kept_T: Tensor | None) -> Metrics:
    count = _number(tokens.mask)
    # k3 of KL(old || current) and the ratio share an exponential, and expm1 is good for both; masked tokens add 0
    bounded_T = tokens.log_ratio.clamp(max=surrogates.LOG_RATIO_LIMIT)
    excess_T = torch.expm1(bounded_T)
    totals = {
        "policy/kl": _sum(excess_T - bounded_T),
        # the clamp of `ratio` from below, as a distance from 1
        "policy/ratio_mean": count + _sum(excess_T.clamp_(min=_LEAST_EXCESS)),
        "policy/ratio_clamped": _number(surrogates.is_clamped(tokens.log_ratio)),
    }
    # before the metrics below take memory of this size
    del bounded_T, excess_T
    indicator = clip_indicator_of(record.surrogate)
    if indicator is not None:
        totals["policy/clip_fraction"] = _total(indicator(record.surrogate, tokens), tokens.mask)
    if kept_T is not None:
        totals["policy/off_policy_kept"] = _total(kept_T, tokens.mask)
    if tokens.entropy is not None:
        totals["policy/entropy"] = _total(tokens.entropy, tokens.mask)
    if tokens.reference_log_ratio is not None:
        totals["kl/reference"] = _total(kl.k3(tokens.reference_log_ratio), tokens.mask)
        totals["kl/reference_clamped"] = _total(kl.is_clamped(tokens.reference_log_ratio), tokens.mask)
    return {name: (total, count) for name, total in totals.items()}
