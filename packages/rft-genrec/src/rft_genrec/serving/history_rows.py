"""Histories as JSON, of a line of a file or of a request, each checked; and their recommendations as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft_genrec.serving.recommendations import Recommended


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """A history with whose it is, or why it is none."""

    user: Any
    history: tuple[int, ...] = ()
    error: str = ""


def read_row(value: Any, num_items: int, *, skip_unknown: bool) -> HistoryRow:
    """Return the history of {"user": ..., "history": [...]}, or of a bare list; `error` says what is wrong."""
    row: Mapping[str, Any] = value if isinstance(value, Mapping) else {"history": value}
    user, history = row.get("user"), row.get("history")
    if not isinstance(history, list):
        return HistoryRow(user, error=f"history is {_short(history)}, and a list of item numbers is needed")
    # bool is a kind of int
    wrong = next((item for item in history if type(item) is not int), None)
    if wrong is not None:
        return HistoryRow(user, error=f"history holds {_short(wrong)}, and items are numbers such as 14")
    outside = next((item for item in history if not 0 <= item < num_items), None)
    if outside is not None and not skip_unknown:
        return HistoryRow(user, error=f"unknown item {outside}: the catalogue has the items 0 to {num_items - 1}")
    return HistoryRow(user, tuple(history))


def read_line(line: str, num_items: int, *, skip_unknown: bool) -> HistoryRow:
    """Return the history of a line of a file."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return HistoryRow(None, error=f"the line is no JSON: {error}")
    return read_row(value, num_items, skip_unknown=skip_unknown)


def answer(row: HistoryRow, found: Recommended | None) -> dict[str, Any]:
    """Return the recommendations of a history as JSON; its error where there are none."""
    record: dict[str, Any] = {} if row.user is None else {"user": row.user}
    if found is None:
        return record | {"error": row.error}
    record |= {"items": list(found.items), "titles": list(found.titles), "scores": list(found.scores)}
    return record | ({"note": found.note} if found.note else {})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
