"""Progress of a run in a notebook: one output that is drawn anew after every step. No drawing library is imported."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs.reader import is_number

_SHOWN = (
    "reward/mean",
    "sft/loss",
    "reward/groups_with_signal",
    "kl/reference",
    "policy/entropy",
    "policy/gradient_norm",
    "completion/length_mean",
    "reward/unscored",
)
"""Metrics of a step that the panel shows, where the step has them."""
_CELL = "padding:1px 12px 1px 0"


def in_notebook() -> bool:
    """Return whether this program runs in a kernel of Jupyter, which can draw what it is given."""
    shell = sys.modules.get("IPython")
    found: Any = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return getattr(found, "kernel", None) is not None


class NotebookPanel:
    """A sink that shows step, time left, metrics and evaluations in the output of a cell."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._name = ""
        self._last: dict[str, Any] = {}
        self._first: dict[str, float] = {}
        self._evaluations: list[Mapping[str, Any]] = []
        self._outcome = ""
        self._shown: Any = None

    def start(self, info: RunInfo) -> None:
        """Draw the panel for the first time."""
        self._name = str(info.directory)
        self._draw()

    def step(self, record: Mapping[str, Any]) -> None:
        """Draw the metrics of a step."""
        self._last = {**self._last, **record}
        for name in _SHOWN:
            if is_number(record.get(name)):
                self._first.setdefault(name, float(record[name]))
        self._draw()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: the panel draws numbers."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Draw an evaluation of the held-out rows."""
        self._evaluations.append(record)
        self._draw()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Draw the end of the run, and leave it in the output."""
        self._outcome = str(summary.get("outcome", ""))
        self._draw()

    def page(self) -> str:
        """Return the panel as HTML, every text of the run escaped."""
        step = int(self._last.get("step") or 0)
        left = self._last.get("time/left")
        time = f", {float(left):,.0f} s left" if is_number(left) and not self._outcome else ""
        head = f"{html.escape(self._name)}: step {step} of {self._num_steps}{time} {html.escape(self._outcome)}"
        bar = f'<progress value="{step}" max="{max(self._num_steps, 1)}" style="width:24em"></progress>'
        rows = [
            self._row(name, f"{self._first[name]:.4g} &rarr; {float(self._last[name]):.4g}")
            for name in _SHOWN
            if name in self._first and is_number(self._last.get(name))
        ]
        rows += [
            self._row(f"held-out, step {record.get('step')}", _scores(record))
            for record in [*self._evaluations[:1], *self._evaluations[1:][-1:]]
            if _scores(record)
        ]
        return f"<div>{head}<br>{bar}<table>{''.join(rows)}</table></div>"

    def _row(self, name: str, value: str) -> str:
        return f'<tr><td style="{_CELL}">{html.escape(name)}</td><td style="{_CELL}">{value}</td></tr>'

    def _draw(self) -> None:
        # brought by every notebook, and by nothing that this package needs
        notebook: Any = import_module("IPython.display")
        page = notebook.HTML(self.page())
        if self._shown is None:
            self._shown = notebook.display(page, display_id=True)
        else:
            self._shown.update(page)


def _scores(record: Mapping[str, Any]) -> str:
    numbers = {
        name.removeprefix("eval/"): record[name]
        for name in ("eval/accuracy", "eval/reward", "eval/loss")
        if is_number(record.get(name))
    }
    return ", ".join(f"{name} {float(value):.4g}" for name, value in numbers.items())
