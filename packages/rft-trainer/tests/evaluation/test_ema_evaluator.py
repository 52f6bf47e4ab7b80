"""The averages are in the policy's place while they are evaluated, and the engine serves the weights afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rft_trainer.evaluation.ema_evaluator import EmaEvaluator, averaged_record
from rft_trainer.evaluation.evaluator import EvaluationResult

RESULT = EvaluationResult((1.0, 0.0), (True, False), 1, 2.5)


class Noted:
    """The collaborators of an evaluation of averages, which note what the policy's weights are."""

    def __init__(self, fails: bool = False) -> None:
        self.weights = "own"
        self.served = "own"
        self.noted: list[str] = []
        self.fails = fails

    @contextmanager
    def averages(self) -> Iterator[None]:
        self.weights = "average"
        try:
            yield
        finally:
            self.weights = "own"

    def refresh(self) -> None:
        self.served = self.weights
        self.noted.append(f"refreshed {self.served}")

    def evaluate(self) -> EvaluationResult:
        self.noted.append(f"evaluated {self.served}")
        if self.fails:
            raise OSError
        return RESULT


def evaluator(noted: Noted) -> EmaEvaluator:
    evaluate: Any = noted.evaluate
    return EmaEvaluator(evaluate, noted.averages, noted.refresh)


def test_the_averages_are_served_for_the_evaluation_and_the_weights_after_it() -> None:
    noted = Noted()
    assert evaluator(noted)() is RESULT
    assert noted.noted == ["refreshed average", "evaluated average", "refreshed own"]


def test_the_weights_are_back_in_the_policy_after_an_error() -> None:
    noted = Noted(fails=True)
    with pytest.raises(OSError):  # noqa: PT011
        evaluator(noted)()
    assert noted.weights == "own"


def test_the_row_has_the_averages_under_names_of_their_own() -> None:
    assert averaged_record(RESULT) == {
        "eval_ema/accuracy": 0.5,
        "eval_ema/reward": 0.5,
        "eval_ema/n": 2,
        "eval_ema/unscored": 0,
        "eval_ema/truncated": 1,
        "eval_ema/mean_tokens": 2.5,
        "ema_rewards": (1.0, 0.0),
        "ema_correct": (True, False),
    }
