"""The list of runs: a line each, from their short files and the end of their rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rft.dashboard.growing_rows import last_rows
from rft.report.page import measures_of
from rft_core.secrets import scrub_text
from rft_trainer.runs.reader import RunFiles, as_object, is_number, read_head, read_text

State = Literal["running", "ended", "stopped", "failed", "unreadable"]
_TAIL_BYTES = 64 << 10
_MOST_CHARACTERS = 2000
_FAILURES = ("error.json", "bundle-*.json")
_BY_SIGNAL = "run.stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One line of the list."""

    id: str
    name: str
    place: str
    """The folders from the given one down to it."""
    verb: str = ""
    """The command that made it."""
    state: State
    outcome: str = ""
    step: int | None = None
    num_steps: int | None = None
    """Steps that it is to make."""
    measure: str = ""
    """The metric that is the main number of its command."""
    value: float | None = None
    touched: float = 0.0
    """When the run last wrote, in seconds since 1970."""
    why: str = ""
    """What ended it before its time, or why it cannot be read."""

    def as_record(self) -> dict[str, Any]:
        """Return the line as plain JSON."""
        return asdict(self)


def run_entry(digest: str, place: str, path: Path) -> RunEntry:
    """Return the line of a run."""
    head = read_head(path)
    rows = last_rows(path / "metrics.jsonl", _TAIL_BYTES)
    last = rows[-1] if rows else as_object(None)
    state, why = state_of(head)
    main = measures_of(head)[0]
    return RunEntry(
        id=digest,
        name=head.name,
        place=place,
        verb=head.verb,
        state=state,
        outcome=head.outcome,
        step=as_integer(last.get("step", head.summary.get("steps"))),
        num_steps=as_integer(last.get("num_steps")),
        measure=main,
        value=_last_number(rows, main),
        touched=head.touched,
        why=why,
    )


def state_of(head: RunFiles) -> tuple[State, str]:
    """Return how a run stands, and what ended it."""
    outcome = head.outcome
    if outcome == "running":
        return "running", ""
    if outcome in ("finished", "done"):
        return "ended", ""
    code, what = _failure(head.path)
    # a signal that a run saves after is no fault of it
    return ("failed" if what and code != _BY_SIGNAL else "stopped", what)


def as_integer(value: object) -> int | None:
    """Return a JSON value as a whole number, where it is one."""
    return int(value) if is_number(value) else None


def _last_number(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next((float(row[name]) for row in reversed(rows) if is_number(row.get(name))), None)


def _failure(path: Path) -> tuple[str, str]:
    """Return code and text of the newest report of a failure; empty where the run has made steps since."""
    files = [file for pattern in _FAILURES for file in path.glob(pattern) if file.is_file() and not file.is_symlink()]
    times = {file: file.stat().st_mtime for file in files}
    metrics = path / "metrics.jsonl"
    if not times:
        return "", ""
    newest = max(times, key=lambda file: times[file])
    if metrics.exists() and times[newest] < metrics.stat().st_mtime:
        return "", ""
    try:
        found = as_object(json.loads(read_text(newest)))
    except (ValueError, RecursionError):
        return "", newest.name
    problem = as_object(found.get("problem")) or found
    what = problem.get("what") or problem.get("message")
    shown = scrub_text(what)[:_MOST_CHARACTERS] if isinstance(what, str) and what else newest.name
    return str(problem.get("code", "")), shown
