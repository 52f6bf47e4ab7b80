"""Evaluation of the moving averages of the weights: at the same places and of the same prompts as theirs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from rft_trainer.evaluation.evaluator import EvaluationResult, Evaluator

SwapInEma = Callable[[], AbstractContextManager[None]]
"""While the block of what it gives runs, the policy's weights are their averages; all ranks enter it together."""


class EmaEvaluator:
    """Answers the evaluator's prompts with the averages.

    The engine keeps its version: the weights of a version are those that samples are drawn with, and none is drawn
    while the averages stand in their place.
    """

    def __init__(self, evaluator: Evaluator, averages: SwapInEma, refresh: Callable[[], None]) -> None:
        """`refresh` lets the engine serve what the policy holds now, under the version that it has."""
        self._evaluator, self._averages, self._refresh = evaluator, averages, refresh

    def __call__(self) -> EvaluationResult:
        """The result of all prompts; the engine serves the weights again."""
        with self._averages():
            self._refresh()
            result = self._evaluator()
        self._refresh()
        return result


def averaged_record(result: EvaluationResult) -> dict[str, object]:
    """What it adds to the row of the evaluation: its numbers under "eval_ema/", and its lists beside the others."""
    numbers = {f"eval_ema/{name.removeprefix('eval/')}": value for name, value in result.as_record().items()}
    return numbers | {"ema_rewards": result.rewards, "ema_correct": result.correct}
