"""Metrics of held-out answers that installed tasks add, beside accuracy and reward: `--eval_metrics TASK,...`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rft_core.errors import OptionsError
from rft_trainer.installed_tasks.discovery import bad_result, called, find_task

_FLAG = "--eval_metrics"
_CODE = "task.evaluation"
BUILT_IN = frozenset({"accuracy", "reward", "n", "unscored", "truncated", "mean_tokens", "best_step", "loss"})
"""Names that an evaluation has without a task."""


@dataclass(frozen=True, slots=True)
class TaskMetrics:
    """The functions of the tasks that `--eval_metrics` names."""

    functions: Mapping[str, str]
    """Task -> "module:function"."""

    @classmethod
    def of(cls, names: str) -> TaskMetrics | None:
        """Find tasks whose names are joined by commas; None where none is named.

        Raises:
            OptionsError: no such task, one without an evaluation, or one named twice.
        """
        chosen = [name.strip() for name in names.split(",") if name.strip()]
        twice = next((name for name in chosen if chosen.count(name) > 1), None)
        if twice is not None:
            raise OptionsError(
                code="task.named_twice",
                what=f"eval_metrics = {names} names {twice} twice",
                where=_FLAG,
                why="the metrics of a task are computed once",
                do=f"{_FLAG} {','.join(dict.fromkeys(chosen))}",
            )
        if not chosen:
            return None
        return cls({name: find_task(name, flag=_FLAG, part="evaluation").evaluation for name in chosen})

    def __call__(
        self, responses: Sequence[str], labels: Sequence[Any], rewards: Sequence[float | None]
    ) -> dict[str, float]:
        """Compute the metrics by name, from one answer a prompt; a reward is None where there is none.

        Raises:
            DataError: a function cannot be imported or raises, gives something else than finite numbers by name, or a
                name that is taken.
        """
        metrics: dict[str, float] = {}
        for task, reference in self.functions.items():
            given: tuple[Any, ...] = (list(responses), list(labels), list(rewards))
            for name, value in _pairs(task, reference, called(task, reference, given, code=_CODE, as_items=True)):
                if name in BUILT_IN or name in metrics:
                    raise _bad(task, reference, f"a metric {name}, of which there is one already")
                metrics[name] = value
        return metrics


def _pairs(task: str, reference: str, items: Sequence[Any]) -> list[tuple[str, float]]:
    """Return names and values, of which each is text and a finite number."""
    for item in items:
        name, value = item
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if not isinstance(name, str) or not is_number:
            raise _bad(task, reference, f"{name!r}: {str(value)[:80]!r}, and not a finite number by its name")
    return [(name, float(value)) for name, value in items]


def _bad(task: str, reference: str, what: str) -> Exception:
    return bad_result(task, f"{reference} gave {what}", code=_CODE, place=reference)
