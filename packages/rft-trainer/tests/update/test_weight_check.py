"""The first update of a run is told where it changed no weight; comparisons of later steps: `test_guarded_steps.py`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from rft_trainer.testing.bigram import OneRank
from rft_trainer.update.weight_check import FirstUpdate, WeightCheck, checksums

UPDATED = {"policy/updates": 1, "policy/gradient_norm": 0.5, "policy/learning_rate": 1e-9}


class Bench:
    """Weights, and the check of their first update inside that of a run."""

    def __init__(self, *, every: int = 0, factors: str = "") -> None:
        self.tensors: dict[str, Tensor] = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
        first = FirstUpdate(
            tensors=lambda: self.tensors.items(), collectives=OneRank(), rate_flag="--learning_rate", factors=factors
        )
        self.check = WeightCheck(
            tensors=lambda: self.tensors.items(),
            collectives=OneRank(),
            every=every,
            replicated=True,
            remedy="resume",
            first=first,
        )
        self.step = 0

    def take(self, record: Mapping[str, object], change: str = "") -> None:
        """One step with these metrics, in which a tensor changes."""
        self.check.before(self.step, None)
        if change:
            self.tensors[change] = self.tensors[change] + 1e-3
        self.step += 1
        self.check.after(self.step, None, record)


def test_an_update_that_changes_no_weight_is_told_once_with_its_rate(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.WARNING):
        bench.take(UPDATED)
        bench.take(UPDATED)
    [record] = caplog.records
    told = record.getMessage()
    assert told.startswith("step 1 changed no weight: the gradient had the norm 0.5, the learning rate was 1e-09")
    assert "all of 2 tensors" in told
    assert told.endswith("do  --learning_rate 1e-06")


def test_factors_of_0_are_named(caplog: pytest.LogCaptureFixture) -> None:
    Bench(factors="*=0").take(UPDATED | {"policy/learning_rate": 1e-3})
    assert "leave lr_factors out, or give a part a factor above 0: it is *=0" in caplog.text


@pytest.mark.parametrize("change", ["a", "b"])
def test_one_tensor_that_changes_is_enough(caplog: pytest.LogCaptureFixture, change: str) -> None:
    bench = Bench()
    bench.take(UPDATED, change)
    bench.take(UPDATED)
    assert caplog.records == []


def test_a_copy_that_the_update_made_is_a_change(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.check.before(0, None)
    bench.tensors["master/a"] = torch.ones(3)
    bench.check.after(1, None, UPDATED)
    assert caplog.records == []


@pytest.mark.parametrize(
    "record",
    [
        {},
        UPDATED | {"policy/updates": 0, "policy/gradient_norm": math.nan},
        UPDATED | {"policy/gradient_norm": 0.0},
        UPDATED | {"policy/gradient_norm": math.nan},
    ],
    ids=["critic alone", "refused", "equal rewards", "no norm"],
)
def test_steps_without_a_gradient_are_waited_for(caplog: pytest.LogCaptureFixture, record: dict[str, object]) -> None:
    bench = Bench()
    bench.take(record)
    bench.take(record)
    assert caplog.records == []
    bench.take(UPDATED)
    assert "step 3 changed no weight" in caplog.text


def test_without_an_interval_nothing_else_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.take(UPDATED, "a")
    bench.tensors["a"] = bench.tensors["a"] * 2  # outside of a step
    bench.take(UPDATED, "a")
    assert bench.step == 2
    assert caplog.records == []


def test_sums_are_of_the_bits() -> None:
    values = torch.tensor([0.0, -0.0, 1.0])
    same = checksums([("a", values), ("b", values.clone()), ("none", torch.empty(0))])
    assert same["a"] == same["b"]
    assert same["none"] == 0
    assert checksums([("a", torch.tensor([0.0, 0.0, 1.0]))])["a"] != same["a"], "0 and -0 are other bits"
