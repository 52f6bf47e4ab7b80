"""Metrics of optimizer steps: the loss scale, and what was applied."""

from __future__ import annotations

import math

import pytest

from rft_trainer.loops.update_metrics import scale_metrics, update_metrics
from rft_trainer.update.optimizer_step import UpdateOutcome


def outcome(applied: bool, loss_scale: float | None = None, norm: float = 1.0) -> UpdateOutcome:
    return UpdateOutcome(norm, applied, 0.1, 1, loss_scale)


def test_the_loss_scale_is_that_of_the_last_step_and_skipped_steps_are_counted() -> None:
    steps = [outcome(False, 64.0), outcome(False, 32.0), outcome(True, 16.0)]
    assert scale_metrics("critic", steps) == {"critic/loss_scale": 16.0, "critic/updates_skipped": 2}
    assert scale_metrics("policy", steps[2:]) == {"policy/loss_scale": 16.0, "policy/updates_skipped": 0}
    assert scale_metrics("policy", []) == {}
    assert scale_metrics("policy", [outcome(True, None)]) == {}
    assert scale_metrics("policy", [outcome(True, 8.0), outcome(True, None)]) == {}


def test_the_norm_is_the_mean_of_the_steps_that_were_applied() -> None:
    found = update_metrics("policy", [outcome(True, norm=1.0), outcome(True, norm=3.0), outcome(False, norm=math.nan)])
    assert found["policy/gradient_norm"] == pytest.approx(2.0)
    assert (found["policy/updates"], found["policy/updates_refused"], found["policy/micro_batches"]) == (2, 1, 3)
    assert math.isnan(float(str(update_metrics("policy", [])["policy/gradient_norm"])))
