"""The panel of a notebook: one output drawn anew, its figures, and texts of the run that are no HTML."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rft.library.notebook_panel import NotebookPanel, in_notebook
from rft_trainer.metrics.sink import RunInfo


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a notebook was told to show and to show anew."""
    told: list[tuple[str, str]] = []

    def display(page: str, *, display_id: bool) -> Any:
        assert display_id
        told.append(("display", page))
        return SimpleNamespace(update=lambda page: told.append(("update", page)))

    module = ModuleType("IPython.display")
    module.HTML, module.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return told


def test_one_output_is_drawn_anew(drawn: list[tuple[str, str]]) -> None:
    panel = NotebookPanel(4)
    panel.start(RunInfo("a", Path("runs/<a>")))
    panel.evaluation({"step": 0, "eval/accuracy": 0.125})
    panel.step({"step": 1, "reward/mean": 0.25, "policy/entropy": float("nan"), "time/left": 30.0})
    panel.step({"step": 2, "reward/mean": 0.5})
    panel.evaluation({"step": 2, "eval/accuracy": 0.75})
    assert [kind for kind, _ in drawn] == ["display"] + ["update"] * 4
    page = drawn[-1][1]
    assert "runs/&lt;a&gt;: step 2 of 4, 30 s left" in page
    assert '<progress value="2" max="4"' in page
    assert "0.25 &rarr; 0.5" in page
    assert "policy/entropy" not in page, "a metric without a number"
    assert "held-out, step 0" in page
    assert "accuracy 0.125" in page
    assert "accuracy 0.75" in page
    panel.finish({"outcome": "finished"})
    assert "step 2 of 4 finished" in drawn[-1][1]
    assert " left" not in drawn[-1][1]


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        (None, False),
        (SimpleNamespace(get_ipython=lambda: None), False),
        (SimpleNamespace(get_ipython=lambda: SimpleNamespace()), False),
        (SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object())), True),
    ],
    ids=["plain", "imported", "terminal", "kernel"],
)
def test_a_kernel_is_a_notebook(shell: Any, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if shell is None:
        monkeypatch.delitem(sys.modules, "IPython", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "IPython", shell)
    assert in_notebook() is expected
