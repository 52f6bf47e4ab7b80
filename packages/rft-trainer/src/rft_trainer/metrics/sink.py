"""Protocol of a sink for a run's records, and the numbers of a record by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Description of a run for trackers; `config` is the resolved configuration as plain JSON."""

    name: str
    directory: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed_from_step: int | None = None


class Sink(Protocol):
    """Receiver of the records of a run, in the order start, (step | samples | evaluation)*, finish.

    A record of a step or an evaluation has an integer "step"; its other names are flat, with
    slashes. Values are numbers, texts, lists or null. `samples` are responses of a step, rows as
    those of `rollouts/step_N.jsonl`.
    """

    def start(self, info: RunInfo) -> None: ...

    def step(self, record: Mapping[str, Any]) -> None: ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def evaluation(self, record: Mapping[str, Any]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


SAMPLE_COLUMNS = (
    "prompt",
    "response",
    "label",
    "reward",
    "advantage",
    "finish_reason",
    "num_tokens",
    "prompt_id",
    "sample",
)


def sample_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns of `SAMPLE_COLUMNS` and the cells of each row; a cell is a text, a number or None.

    Numbers of a column are all float, or all int, as trackers want a column of one type; labels and the like that are
    no text are JSON.
    """
    return list(SAMPLE_COLUMNS), [[_cell(name, row.get(name)) for name in SAMPLE_COLUMNS] for row in rows]


def _cell(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in ("num_tokens", "sample"):
        return int(value)
    if name in ("reward", "advantage"):
        return float(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def scalars(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a record by name, nested records flattened with slashes, without "step"."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            numbers |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and (prefix or name != "step"):
            numbers[f"{prefix}{name}"] = value
    return numbers


def evaluation_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation under "eval/" or "eval_ema/", so that they never collide with a step's."""
    own = ("eval/", "eval_ema/")
    return {name if name.startswith(own) else f"eval/{name}": value for name, value in scalars(record).items()}
