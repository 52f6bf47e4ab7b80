"""Protocol of a sink for a run's records, and the numbers of a record by name."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Receiver of the records of a run, in the order start, (step | evaluation)*, finish.

    A record of a step or an evaluation has an integer "step"; its other names are flat, with
    slashes. Values are numbers, texts, lists or null.
    """

    def start(self, info: RunInfo) -> None: ...

    def step(self, record: Mapping[str, Any]) -> None: ...

    def evaluation(self, record: Mapping[str, Any]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


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
