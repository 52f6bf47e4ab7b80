"""Accuracy of the rows that have the same value in a column, such as a level or a subject."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rft_algos.statistics import Interval, share_interval
from rft_core.errors import DataError
from rft_core.nearest_names import nearest_names
from rft_trainer.records.rollouts import Prompt


def accuracy_by(column: str, prompts: Sequence[Prompt], correct: Sequence[float | None]) -> dict[str, Interval]:
    """Return the accuracy of each value of a column with its 95 % interval over the prompts that have a score.

    Values are in the order of numbers where all are, else of their texts.

    Raises:
        DataError: a row lacks the column.
    """
    groups: dict[str, list[float]] = {}
    for prompt, right in zip(prompts, correct, strict=True):
        if right is not None:
            groups.setdefault(_value(prompt, column), []).append(float(right))
    return {value: share_interval(groups[value]) for value in sorted(groups, key=_order)}


def require_column(column: str, prompts: Sequence[Prompt]) -> None:
    """Refuse a column that a row lacks.

    Raises:
        DataError: it names the row.
    """
    for prompt in prompts:
        _value(prompt, column)


def _value(prompt: Prompt, column: str) -> str:
    columns: Mapping[str, object] = prompt.columns
    if column not in columns:
        near = nearest_names(column, list(columns), count=1)
        raise DataError(
            code="eval.no_column",
            what=f"{prompt.prompt_id} has no column {column}; it has {', '.join(columns)}",
            where="--eval_by",
            why="the accuracy is divided by a column that every row has",
            do=f"--eval_by {near[0] if near else 'with one of these columns'}",
        )
    value = columns[column]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _order(value: str) -> tuple[bool, float, str]:
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value
