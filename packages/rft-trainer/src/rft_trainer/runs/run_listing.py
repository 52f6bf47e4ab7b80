"""The runs of a directory at a glance, whatever state each is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_core.durable_files import last_record
from rft_core.errors import RftError
from rft_trainer.runs.directory import RunDirectory

UNFINISHED = "unfinished"
UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class RunOverview:
    """One line of a listing; a value that the run does not tell is None."""

    name: str
    path: Path
    outcome: str
    """As the summary says; "unfinished" without a summary (live or killed), "unreadable" for a damaged run."""
    steps: int | None
    minutes: float | None
    metric: str | None
    """What `before` and `after` measure."""
    before: float | None
    after: float | None
    problem: str = ""
    """Why a run is unreadable."""


def list_runs(directory: str | Path) -> list[RunOverview]:
    """Every run directly under `directory`, or `directory` itself if it is one, by name; damaged runs included."""
    root = Path(directory).expanduser()
    if (root / "config.yaml").is_file():
        return [overview(root)]
    if not root.is_dir():
        return []
    found = [entry for entry in root.iterdir() if entry.is_dir() and _looks_like_run(entry)]
    return [overview(path) for path in sorted(found, key=lambda path: path.name)]


def overview(path: Path) -> RunOverview:
    """What one run has to tell."""
    try:
        summary = RunDirectory(path).read_summary()
        last = last_record(path / "metrics.jsonl")
    except (RftError, OSError) as error:
        return RunOverview(path.name, path, UNREADABLE, None, None, None, None, None, str(error).splitlines()[0])
    told = summary or {}
    evaluations = told.get("eval")
    metric, before, after = _before_and_after(evaluations if isinstance(evaluations, Mapping) else {})
    seconds = _number(told.get("seconds"))
    steps = _number(told.get("steps", (last or {}).get("step")))
    return RunOverview(
        name=path.name,
        path=path,
        outcome=str(told.get("outcome", UNFINISHED)),
        steps=None if steps is None else int(steps),
        minutes=None if seconds is None else seconds / 60.0,
        metric=metric,
        before=before,
        after=after,
    )


def _looks_like_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.yaml", "summary.json", "metrics.jsonl"))


def _before_and_after(evaluations: Mapping[str, Any]) -> tuple[str | None, float | None, float | None]:
    """The metric that both evaluations have: accuracy if it is there, else the first number but the count `n`."""
    before, after = evaluations.get("before"), evaluations.get("after")
    before = before if isinstance(before, Mapping) else {}
    after = after if isinstance(after, Mapping) else {}
    names = [name for name in (*after, *before) if name != "n" and _number({**before, **after}[name]) is not None]
    if not names:
        return None, None, None
    metric = "accuracy" if "accuracy" in names else str(names[0])
    return metric, _number(before.get(metric)), _number(after.get(metric))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
