"""Pages of sampled answers: those of a run that a person asks for, group by group, the newest steps first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.dashboard.run_facts import step_of
from rft.dashboard.run_folders import RequestRefused, RunFolders
from rft_trainer.rollout_files.selection import RowFilter
from rft_trainer.runs.reader import as_object, is_number, rows

GROUPS_A_PAGE = 20
"""A page ends with the step that reaches so many groups."""
_MOST_GROUPS = 100
"""Of one step."""
_MOST_ANSWERS = 64
"""Of one group."""
_MOST_CHARACTERS = 20_000
"""Of one text; the rest is in the file of the step."""
_MOST_BYTES = 128 << 20
"""Files that are searched for one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """Conditions on answers; one that is None or empty holds of every answer."""

    rows: RowFilter = field(default_factory=RowFilter)
    text: str = ""
    """In the answer or its prompt, in capital letters or not."""
    before: int | None = None
    """Only steps before this one: the next page."""

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row holds all of it."""
        text = self.text.casefold()
        found = not text or any(text in str(row.get(name)).casefold() for name in ("response", "prompt"))
        return found and self.rows.takes(dict(row))

    def takes_step(self, step: int) -> bool:
        """Return whether answers of a step may be taken."""
        return self.rows.step in (None, step) and (self.before is None or step < self.before)


def sample_page(folders: RunFolders, run: Path, query: SampleQuery) -> dict[str, Any]:
    """Return a page of groups of answers as plain JSON.

    `before` is of the next page, and None where there is none; `searched` says how many answers were looked at.

    Raises:
        RequestRefused: a file of the run leads out of the folders.
    """
    found: list[dict[str, Any]] = []
    searched = num_bytes = 0
    files = _files(run)
    wanted = [step for step in sorted(files, reverse=True) if query.takes_step(step)]
    following: int | None = None
    for step in wanted:
        if len(found) >= GROUPS_A_PAGE or num_bytes > _MOST_BYTES:
            break
        file = folders.inside(files[step])
        num_bytes += file.stat().st_size
        answers = rows(file)
        searched += len(answers)
        found += _groups(step, answers, query)
        following = step
    is_last = following is None or following == wanted[-1]
    return {
        "groups": found,
        "searched": searched,
        "before": None if is_last else following,
        "steps": sorted(files),
    }


def _files(run: Path) -> dict[int, Path]:
    found = ((step_of(file), file) for file in (run / "rollouts").glob("step_*.jsonl"))
    return {step: file for step, file in found if step is not None}


def _groups(step: int, answers: Sequence[Mapping[str, Any]], query: SampleQuery) -> list[dict[str, Any]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in answers:
        if "response" in row and query.takes(row):
            groups.setdefault(str(row.get("prompt_id", row.get("prompt"))), []).append(row)
    return [_group(step, name, found) for name, found in list(groups.items())[:_MOST_GROUPS]]


def _group(step: int, name: str, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = answers[0]
    label = first.get("label")
    return {
        "step": step,
        "prompt_id": name,
        "prompt": _cut(first.get("prompt")),
        "label": None if label in (None, "") else _cut(label),
        "answers": [_answer(row) for row in answers[:_MOST_ANSWERS]],
        "more": max(0, len(answers) - _MOST_ANSWERS),
    }


def _answer(row: Mapping[str, Any]) -> dict[str, Any]:
    numbers = ("reward", "advantage", "num_tokens", "sample")
    texts = ("status", "finish_reason", "failure", "detail")
    breakdown = as_object(row.get("breakdown"))
    return {
        "response": _cut(row.get("response")),
        "breakdown": {name: value for name, value in breakdown.items() if is_number(value)},
        **{name: row.get(name) if is_number(row.get(name)) else None for name in numbers},
        **{name: _cut(row[name]) if row.get(name) else "" for name in texts},
    }


def _cut(value: object) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}... ({len(text):,} characters)"


def whole_or_none(text: str, name: str) -> int | None:
    """Return a whole number of a request; None where it is empty.

    Raises:
        RequestRefused: it is no such number.
    """
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise RequestRefused(400, f"{name} is {text[:40]!r}; it is a whole number")
    return int(text)


def real_or_none(text: str, name: str) -> float | None:
    """Return a number of a request; None where it is empty.

    Raises:
        RequestRefused: it is no finite number.
    """
    if not text:
        return None
    try:
        number = float(text[:40])
    except ValueError:
        number = float("nan")
    if not is_number(number):
        raise RequestRefused(400, f"{name} is {text[:40]!r}; it is a number")
    return number
