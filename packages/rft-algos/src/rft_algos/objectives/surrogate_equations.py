"""The tokens of a micro-batch as every surrogate sees them, and the surrogates' equations by choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos import surrogates
from rft_algos.algorithms import components
from rft_algos.losses import kl
from rft_algos.objectives.registry import register_clip_mask, register_equation
from rft_algos.packed.segments import all_true

KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


@dataclass(frozen=True, slots=True)
class Tokens:
    """[T] each, 0 where masked, in the type of the loss. Only `logprobs`, `log_ratio` and `entropy` carry gradient."""

    logprobs: Tensor
    old_logprobs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    reference_log_ratio: Tensor | None
    behaviour_logprobs: Tensor | None
    entropy: Tensor | None
    weights: Tensor | None
    selected: Tensor | None
    mask: Tensor
    segment_ids: Tensor

    @classmethod
    def masked(
        cls,
        *,
        logprobs_T: Tensor,
        old_logprobs_T: Tensor,
        advantages_T: Tensor,
        loss_mask_T: Tensor,
        segment_ids_T: Tensor,
        dtype: torch.dtype,
        reference_logprobs_T: Tensor | None = None,
        behaviour_logprobs_T: Tensor | None = None,
        entropy_T: Tensor | None = None,
        token_weights_T: Tensor | None = None,
        selected_T: Tensor | None = None,
    ) -> Tokens:
        """Replace what stands at masked tokens by 0, before any equation.

        A gradient of 0 times a slope of NaN would still be NaN, so nothing is masked afterwards.

        Args:
            logprobs_T: [T] as in `policy_loss`, and so all that follow.
            old_logprobs_T: [T].
            advantages_T: [T].
            loss_mask_T: [T] bool.
            segment_ids_T: [T] int64.
            dtype: of the loss.
            reference_logprobs_T: [T] or None.
            behaviour_logprobs_T: [T] or None.
            entropy_T: [T] or None.
            token_weights_T: [T] or None.
            selected_T: [T] bool or None.

        Returns:
            The tokens.
        """

        nothing_masked = loss_mask_T.is_cpu and all_true(loss_mask_T)

        def masked(values_T: Tensor) -> Tensor:
            return values_T.to(dtype) if nothing_masked else torch.where(loss_mask_T, values_T.to(dtype), 0.0)

        current_T, old_T = masked(logprobs_T), masked(old_logprobs_T.detach())
        return cls(
            logprobs=current_T,
            old_logprobs=old_T,
            log_ratio=current_T - old_T,
            advantages=masked(advantages_T.detach()),
            reference_log_ratio=None
            if reference_logprobs_T is None
            else current_T - masked(reference_logprobs_T.detach()),
            behaviour_logprobs=None if behaviour_logprobs_T is None else masked(behaviour_logprobs_T.detach()),
            entropy=None if entropy_T is None else masked(entropy_T),
            weights=None if token_weights_T is None else masked(token_weights_T.detach()),
            selected=None if selected_T is None else selected_T & loss_mask_T,
            mask=loss_mask_T,
            segment_ids=segment_ids_T,
        )


@register_equation(components.PpoClip)
def _ppo_clip(choice: components.PpoClip, tokens: Tokens) -> Tensor:
    return surrogates.ppo_clip(tokens.log_ratio, tokens.advantages, choice.low, choice.high)


@register_clip_mask(components.PpoClip)
def _ppo_clipped(choice: components.PpoClip, tokens: Tokens) -> Tensor:
    return surrogates.ppo_clipped(tokens.log_ratio, tokens.advantages, choice.low, choice.high)


@register_equation(components.DualClip)
def _dual_clip(choice: components.DualClip, tokens: Tokens) -> Tensor:
    return surrogates.dual_clip(tokens.log_ratio, tokens.advantages, choice.low, choice.high, choice.dual)


@register_clip_mask(components.DualClip)
def _dual_clipped(choice: components.DualClip, tokens: Tokens) -> Tensor:
    return surrogates.dual_clipped(tokens.log_ratio, tokens.advantages, choice.low, choice.high, choice.dual)


@register_equation(components.Gspo)
def _gspo(choice: components.Gspo, tokens: Tokens) -> Tensor:
    return surrogates.gspo(
        tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high
    )


@register_equation(components.GspoToken)
def _gspo_token(choice: components.GspoToken, tokens: Tokens) -> Tensor:
    return surrogates.gspo_token(
        tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high
    )


@register_clip_mask(components.GspoToken)
def _gspo_token_clipped(choice: components.GspoToken, tokens: Tokens) -> Tensor:
    return surrogates.gspo_token_clipped(
        tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high
    )


@register_clip_mask(components.Gspo)
def _gspo_clipped(choice: components.Gspo, tokens: Tokens) -> Tensor:
    return surrogates.gspo_clipped(
        tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high
    )


@register_equation(components.Gmpo)
def _gmpo(choice: components.Gmpo, tokens: Tokens) -> Tensor:
    return surrogates.gmpo(
        tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high
    )


@register_clip_mask(components.Gmpo)
def _gmpo_clipped(choice: components.Gmpo, tokens: Tokens) -> Tensor:
    return surrogates.gmpo_clipped(
        tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high
    )


@register_equation(components.Cispo)
def _cispo(choice: components.Cispo, tokens: Tokens) -> Tensor:
    return surrogates.cispo(tokens.logprobs, tokens.log_ratio, tokens.advantages, choice.low, choice.high)


@register_clip_mask(components.Cispo)
def _cispo_clipped(choice: components.Cispo, tokens: Tokens) -> Tensor:
    return surrogates.cispo_clipped(tokens.log_ratio, choice.low, choice.high)


@register_equation(components.Sapo)
def _sapo(choice: components.Sapo, tokens: Tokens) -> Tensor:
    return surrogates.sapo(tokens.log_ratio, tokens.advantages, choice.tau_positive, choice.tau_negative)


@register_equation(components.CpgdClip)
def _cpgd(choice: components.CpgdClip, tokens: Tokens) -> Tensor:
    return surrogates.cpgd(tokens.logprobs, tokens.old_logprobs, tokens.advantages, choice.low, choice.high)


@register_clip_mask(components.CpgdClip)
def _cpgd_clipped(choice: components.CpgdClip, tokens: Tokens) -> Tensor:
    return surrogates.cpgd_clipped(tokens.logprobs, tokens.old_logprobs, tokens.advantages, choice.low, choice.high)


@register_equation(components.Reinforce)
def _reinforce(choice: components.Reinforce, tokens: Tokens) -> Tensor:
    return surrogates.reinforce(tokens.logprobs, tokens.advantages)


@register_equation(components.ImportanceWeighted)
def _importance_weighted(choice: components.ImportanceWeighted, tokens: Tokens) -> Tensor:
    return surrogates.importance_weighted(tokens.log_ratio, tokens.advantages)


@register_equation(components.Dppo)
def _dppo(choice: components.Dppo, tokens: Tokens) -> Tensor:
    equation = surrogates.dppo_tv if choice.divergence == "tv" else surrogates.dppo_kl
    return equation(tokens.logprobs, tokens.old_logprobs, tokens.advantages, choice.low, choice.high)


@register_equation(components.ClipCov)
def _clip_cov(choice: components.ClipCov, tokens: Tokens) -> Tensor:
    assert tokens.selected is not None, "Clip-Cov needs the tokens selected over the whole batch"
    return surrogates.clip_cov(tokens.log_ratio, tokens.advantages, tokens.selected, choice.low, choice.high)


@register_clip_mask(components.ClipCov)
def _clip_cov_clipped(choice: components.ClipCov, tokens: Tokens) -> Tensor:
    assert tokens.selected is not None, "Clip-Cov needs the tokens selected over the whole batch"
    clipped_T = surrogates.ppo_clipped(tokens.log_ratio, tokens.advantages, choice.low, choice.high)
    return clipped_T | tokens.selected


@register_equation(components.KlCov)
def _kl_cov(choice: components.KlCov, tokens: Tokens) -> Tensor:
    assert tokens.selected is not None, "KL-Cov needs the tokens selected over the whole batch"
    return surrogates.kl_cov(tokens.log_ratio, tokens.advantages, tokens.selected, choice.coefficient)


@register_equation(components.Dro)
def _dro(choice: components.Dro, tokens: Tokens) -> Tensor:
    return surrogates.dro(tokens.logprobs, tokens.log_ratio, tokens.advantages, choice.tau)
