"""Losses by the names of their algorithms: one call on padded rows, with advantages that were computed before.

Each is the published record of its name (`rft_algos.algorithms.published`) with the numbers that it takes; records
with everything else that can be changed go to `padded_loss`. Arguments are those of `grpo_loss`; the results are [].
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.published import (
    CispoAlgorithm,
    Dapo,
    DrGrpo,
    GmpoAlgorithm,
    Grpo,
    GspoAlgorithm,
    KlPlace,
    PolicyAlgorithm,
    ReinforceAlgorithm,
    SapoAlgorithm,
)
from rft_algos.objectives.padded_loss import PaddedBatch, padded_loss

_RECORDS: dict[str, PolicyAlgorithm] = {}
"""Records that were asked for, by their text."""
_MOST_RECORDS = 256
"""More are forgotten: a bound that changes from step to step must not fill the memory."""


def grpo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    loss_mask_BL: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.04,
    reference_logprobs_BL: Tensor | None = None,
) -> Tensor:
    """GRPO: mean over sequences of the mean over tokens of the clipped surrogate, and of a KL term.

    loss = mean_i mean_t (ppo_clip_t + kl_coef * k3_t), the KL term only where reference log-probs are given.

    Source: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), equation 3.

    Args:
        logprobs_BL: [B, L] log-probs of the current policy, in nats; the gradient flows through them.
        old_logprobs_BL: [B, L] those of the policy that sampled.
        advantages: [B] one a sequence, such as `group_norm` gives, or [B, L].
        loss_mask_BL: [B, L] bool, true at tokens that the policy sampled; false at prompt and padding.
        clip_low: how far below 1 the ratio may go.
        clip_high: how far above 1 the ratio may go.
        kl_coef: weight of the KL term, per nat.
        reference_logprobs_BL: [B, L] log-probs of the reference policy; None for no KL term.

    Returns:
        [] loss of the whole batch.
    """
    kl_place: KlPlace = "loss" if reference_logprobs_BL is not None else "none"
    record = _record(Grpo, components.PpoClip, clip_low, clip_high, kl_place=kl_place, kl_coef=kl_coef)
    return _loss(record, logprobs_BL, old_logprobs_BL, advantages, loss_mask_BL, reference_logprobs_BL)


def dr_grpo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    loss_mask_BL: Tensor,
    *,
    max_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Dr. GRPO on [B, L] rows: sum over tokens, divided by the number of sequences and one constant length.

    `max_tokens` is that length, the largest response length of the run; the other arguments are those of `grpo_loss`.

    Source: Liu et al. 2025 (arXiv 2503.20783).
    """
    record = _record(DrGrpo, components.PpoClip, clip_low, clip_high, max_tokens=max_tokens)
    return _loss(record, logprobs_BL, old_logprobs_BL, advantages, loss_mask_BL)


def dapo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    loss_mask_BL: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """DAPO on [B, L] rows: mean over all tokens of the clipped surrogate with a higher upper bound.

    Source: Yu et al. 2025 (arXiv 2503.14476), equation 8.
    """
    record = _record(Dapo, components.PpoClip, clip_low, clip_high)
    return _loss(record, logprobs_BL, old_logprobs_BL, advantages, loss_mask_BL)


def gspo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    loss_mask_BL: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """GSPO on [B, L] rows: mean over sequences of the clipped surrogate of their length-normalised ratio.

    Source: Zheng et al. 2025 (arXiv 2507.18071), equations 5 to 7.
    """
    record = _record(GspoAlgorithm, components.Gspo, clip_low, clip_high)
    return _loss(record, logprobs_BL, old_logprobs_BL, advantages, loss_mask_BL)


def gmpo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    loss_mask_BL: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tensor:
    """GMPO on [B, L] rows: mean over sequences of the geometric mean of clipped ratios; bounds in nats.

    Source: Zhao et al. 2025 (arXiv 2507.20673).
    """
    record = _record(GmpoAlgorithm, components.Gmpo, clip_low, clip_high)
    return _loss(record, logprobs_BL, old_logprobs_BL, advantages, loss_mask_BL)


def cispo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    loss_mask_BL: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
) -> Tensor:
    """CISPO on [B, L] rows: mean over all tokens of -min(r, 1 + clip_high) A log pi, the weight without gradient.

    Source: MiniMax 2025, "MiniMax-M1" (arXiv 2506.13585), equations 4 and 5.
    """
    record = _record(CispoAlgorithm, components.Cispo, clip_low, clip_high)
    return _loss(record, logprobs_BL, old_logprobs_BL, advantages, loss_mask_BL)


def sapo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    loss_mask_BL: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Tensor:
    """SAPO on [B, L] rows: mean over sequences of the mean over tokens of the soft-gated surrogate.

    Source: Gao et al. 2025 (arXiv 2511.20347).
    """
    record = _record(SapoAlgorithm, components.Sapo, tau_positive, tau_negative)
    return _loss(record, logprobs_BL, old_logprobs_BL, advantages, loss_mask_BL)


def reinforce_loss(logprobs_BL: Tensor, advantages: Tensor, loss_mask_BL: Tensor) -> Tensor:
    """REINFORCE on [B, L] rows: mean over sequences of the sum over tokens of -A log pi, the loss of RLOO too.

    Source: Williams 1992, "Simple statistical gradient-following algorithms".
    """
    return _loss(
        _record(ReinforceAlgorithm, components.Reinforce), logprobs_BL, logprobs_BL.detach(), advantages, loss_mask_BL
    )


def _record(
    kind: type[PolicyAlgorithm], surrogate: type[components.Surrogate], *numbers: float | None, **choices: Any
) -> PolicyAlgorithm:
    """Return the record with a surrogate of these numbers, in the order of the surrogate's fields."""
    return _RECORDS[_place(kind, surrogate, numbers, tuple(choices.items()))]


# `torch.compile` reads a record that is there, and cannot look into the making of one: it runs at the time of tracing
@torch.compiler.assume_constant_result  # pyright: ignore[reportUnknownMemberType]
def _place(
    kind: type[PolicyAlgorithm],
    surrogate: type[components.Surrogate],
    numbers: tuple[float | None, ...],
    choices: tuple[tuple[str, Any], ...],
) -> str:
    """Make the record where it is new, and return its key."""
    names = (field.name for field in fields(surrogate))
    record = kind(surrogate=surrogate(**dict(zip(names, numbers, strict=True))), **dict(choices))
    key = repr(record)
    if key not in _RECORDS and len(_RECORDS) >= _MOST_RECORDS:
        _RECORDS.clear()
    _RECORDS.setdefault(key, record)
    return key


def _loss(
    record: PolicyAlgorithm,
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    loss_mask_BL: Tensor,
    reference_logprobs_BL: Tensor | None = None,
) -> Tensor:
    # rewards and groups are asked for by advantages alone, which are given
    nothing_B = torch.zeros(loss_mask_BL.shape[:1], dtype=torch.int64, device=loss_mask_BL.device)
    batch = PaddedBatch(
        rewards_B=nothing_B,
        group_ids_B=nothing_B,
        loss_mask_BL=loss_mask_BL,
        old_logprobs_BL=old_logprobs_BL,
        reference_logprobs_BL=reference_logprobs_BL,
    )
    return padded_loss(record, batch, logprobs_BL, advantages=advantages).loss
