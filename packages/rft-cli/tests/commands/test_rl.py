"""`rft-train rl`: the settings and the words reach the training, and its end is shown where there is one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft import rl as loop
from rft_cli.commands import rl
from rft_cli.config.resolve import resolve
from rft_cli.pages import run_summary

SUMMARY = {"outcome": "finished"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of the training and of the last page."""
    told: list[tuple[Any, ...]] = []
    summaries: list[Any] = [SUMMARY, None]

    def train(resolved: Any, command: Any, *, in_place: Any, front: Any) -> Any:
        told.append(("train", resolved.values["pretrain"], list(command), in_place, front))
        return SimpleNamespace(directory=SimpleNamespace(path=Path("run")), summary=summaries.pop(0))

    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(rl, "terminal", lambda: "front")
    monkeypatch.setattr(run_summary, "show", lambda *words: told.append(("show", *words)))
    monkeypatch.setattr(run_summary, "after_training", lambda path: [("next", str(path))])
    return told


def test_a_run_is_trained_and_its_end_is_shown(calls: list[tuple[Any, ...]]) -> None:
    assert rl.run(["--pretrain", "m"]) == 0
    assert calls == [
        ("train", "m", ["rft-train", "rl", "--pretrain", "m"], None, "front"),
        ("show", Path("run"), SUMMARY, [("next", "run")]),
    ]


def test_the_end_is_shown_by_the_rank_that_has_a_summary_and_where_it_is_wanted(calls: list[tuple[Any, ...]]) -> None:
    resolved = resolve("rl", ["--pretrain", "m"])
    assert rl.train(resolved, ["again"], in_place=Path("old"), show_end=False) == Path("run")
    assert rl.train(resolved, ["again"]) == Path("run")
    assert calls == [
        ("train", "m", ["again"], Path("old"), "front"),
        ("train", "m", ["again"], None, "front"),
    ]
