"""The bound of the norm inside of DeepSpeed's step, with a double of what asks for it."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest

from rft_core.errors import PreflightError
from rft_dist.strategies.zero.norm_limit import refuse_above

MODULE = "rft_double_of_deepspeed"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(MODULE)
    vars(made)["is_invalid_grad_norm"] = lambda norm: not math.isfinite(norm)
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


class Stepping:
    """Asks of a norm as DeepSpeed does, and then moves its loss scale."""

    loss_scale = 4.0

    def __init__(self) -> None:
        self.scaled: list[bool] = []

    def step(self, norm: float) -> bool:
        overflow = bool(vars(sys.modules[MODULE])["is_invalid_grad_norm"](norm))
        self._update_scale(overflow)
        return not overflow

    def _update_scale(self, has_overflow: bool = False) -> None:
        self.scaled.append(has_overflow)


Stepping.__module__ = MODULE


def test_a_norm_above_the_bound_is_refused_without_its_scale_and_one_below_is_not(module: ModuleType) -> None:
    before, optimizer = dict(vars(module)), Stepping()
    with refuse_above(optimizer, 10.0) as seen:
        assert not optimizer.step(44.0)
    assert (seen.norm, seen.too_large) == (11.0, True)
    assert optimizer.scaled == [], "a norm is no overflow"
    with refuse_above(optimizer, 10.0) as seen:
        assert optimizer.step(40.0)
    assert (seen.norm, seen.too_large) == (10.0, False)
    assert optimizer.scaled == [False]
    assert dict(vars(module)) == before
    assert optimizer.step(44.0)


def test_what_is_not_finite_is_refused_as_ever(module: ModuleType) -> None:
    optimizer = Stepping()
    with refuse_above(optimizer, 10.0) as seen:
        assert not optimizer.step(math.inf)
    assert not seen.too_large
    assert optimizer.scaled == [True]


def test_an_error_in_the_step_leaves_all_as_it_was(module: ModuleType) -> None:
    before, optimizer = dict(vars(module)), Stepping()

    def fails() -> None:
        with refuse_above(optimizer, 10.0):
            raise RuntimeError("no device")

    with pytest.raises(RuntimeError):
        fails()
    assert dict(vars(module)) == before
    assert "_update_scale" not in vars(optimizer)


def test_a_version_that_does_not_ask_is_refused(module: ModuleType) -> None:
    del vars(module)["is_invalid_grad_norm"]
    optimizer: Any = Stepping()
    with pytest.raises(PreflightError) as caught, refuse_above(optimizer, 10.0):
        pass
    assert caught.value.problem.code == "zero.norm"
    assert "max_norm_spike" in caught.value.problem.do
