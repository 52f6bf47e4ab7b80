"""The tokens of a micro-batch as every surrogate sees them: masked before any equation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos.packed.importance_ratio import impossible_tokens
from rft_algos.packed.segments import all_true_on_cpu
from rft_algos.packed.tracing import is_traced


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

        A gradient of 0 times a slope of NaN would still be NaN, so nothing is masked afterwards. Tokens to which the
        current or the old policy gives no probability (log-prob -inf) are masked too: they have no ratio. Weights of
        tokens are made elsewhere from the mask that was given, so denominators stay.

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

        if may_have_impossible_tokens(logprobs_T, old_logprobs_T):
            loss_mask_T = loss_mask_T & ~impossible_tokens(logprobs_T, old_logprobs_T)
        nothing_masked = all_true_on_cpu(loss_mask_T)

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


def may_have_impossible_tokens(logprobs_T: Tensor, old_logprobs_T: Tensor) -> bool:
    """Return whether a log-prob may be -inf; asked on the CPU only, elsewhere True.

    Args:
        logprobs_T: [T] log-probs of the current policy.
        old_logprobs_T: [T] those of the old policy.

    Returns:
        False where all are finite.
    """
    if is_traced() or not (logprobs_T.is_cpu and old_logprobs_T.is_cpu):
        return True
    # a sum is one pass, and infinity passes through it
    return not bool((logprobs_T.detach().sum() + old_logprobs_T.detach().sum()).isfinite())
