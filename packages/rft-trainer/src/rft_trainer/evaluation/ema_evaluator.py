"""Evaluation of the moving averages of the weights: at the same steps and on the same prompts as the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from rft_trainer.evaluation.evaluator import EvaluationResult, Evaluator

SwapInEma = Callable[[], AbstractContextManager[None]]
"""Returns a context in which the policy's weights are their averages; all ranks enter it together."""


class EmaEvaluator:
    """Evaluator of the moving averages on the prompts of another evaluator.

    The engine keeps its version: the weights of a version are those that samples are drawn with, and none is drawn
    while the averages stand in their place.
    """

    def __init__(self, evaluator: Evaluator, averages: SwapInEma, refresh: Callable[[], None]) -> None:
        """Store the collaborators; `refresh` loads the policy's weights into the engine, under the same version."""
        self._evaluator, self._averages, self._refresh = evaluator, averages, refresh

    def __call__(self) -> EvaluationResult:
        """Evaluate all prompts with the averages; afterwards the engine serves the weights again."""
        with self._averages():
            self._refresh()
            result = self._evaluator()
        self._refresh()  # after the block, when the policy has its weights again
        return result


def averaged_record(result: EvaluationResult) -> dict[str, object]:
    """Return the additions to the evaluation's row: numbers under "eval_ema/", and the lists with prefix "ema_"."""
    numbers = {f"eval_ema/{name.removeprefix('eval/')}": value for name, value in result.as_record().items()}
    return numbers | {"ema_rewards": result.rewards, "ema_correct": result.correct}
