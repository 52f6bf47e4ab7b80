"""Metrics of the optimizer steps that one training step took on a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rft_trainer.update.optimizer_step import UpdateOutcome


def scale_metrics(part: str, outcomes: Sequence[UpdateOutcome]) -> dict[str, float]:
    """Return the loss scale of the last step and the number of skipped steps, by metric name; empty without scaling."""
    if not outcomes or outcomes[-1].loss_scale is None:
        return {}
    skipped = sum(not outcome.applied for outcome in outcomes)
    return {f"{part}/loss_scale": outcomes[-1].loss_scale, f"{part}/updates_skipped": skipped}


def update_metrics(part: str, outcomes: Sequence[UpdateOutcome]) -> Mapping[str, object]:
    """Summarize the optimizer steps that one training step took on a model, as metrics by name."""
    # refused steps have norms that are not finite, which would take the mean with them
    applied = [outcome for outcome in outcomes if outcome.applied]
    norms = [outcome.gradient_norm for outcome in applied]
    return {
        **scale_metrics(part, outcomes),
        f"{part}/gradient_norm": sum(norms) / len(norms) if norms else math.nan,
        f"{part}/learning_rate": outcomes[-1].learning_rate if outcomes else math.nan,
        f"{part}/updates": len(applied),
        f"{part}/updates_refused": len(outcomes) - len(applied),
        f"{part}/micro_batches": sum(outcome.num_micro_batches for outcome in outcomes),
    }
