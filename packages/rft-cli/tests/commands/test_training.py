"""Commands that train: settings and words reach the training, and its end is shown where there is one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_cli.commands import training
from rft_cli.config.resolve import resolve
from rft_cli.pages import run_summary, terminal

SUMMARY = {"outcome": "finished"}
COMMANDS = ("rl", "sft")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of the training and of the last page."""
    told: list[tuple[Any, ...]] = []
    summaries: list[Any] = [SUMMARY, None]

    def trains(name: str) -> Any:
        def train(resolved: Any, words: Any, *, in_place: Any, front: Any) -> Any:
            told.append((name, resolved.values["pretrain"], list(words), in_place, front))
            return SimpleNamespace(directory=SimpleNamespace(path=Path("run")), summary=summaries.pop(0))

        return train

    for name in COMMANDS:
        monkeypatch.setattr(import_module(f"rft.stages.{name}"), "train", trains(name))
    monkeypatch.setattr(terminal, "terminal", lambda training: "front")
    monkeypatch.setattr(run_summary, "show", lambda *words: told.append(("show", *words)))
    (Path("run") / "checkpoints" / "step_000004" / "model").mkdir(parents=True)
    return told


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_is_trained_and_its_end_is_shown(command: str, calls: list[tuple[Any, ...]]) -> None:
    assert training.run(command, ["--pretrain", "m"]) == 0
    first, (name, path, summary, nexts) = calls
    assert first == (command, "m", ["rft-train", command, "--pretrain", "m"], None, "front")
    assert (name, path, summary) == ("show", Path("run"), SUMMARY)
    model = "run/checkpoints/step_000004/model"
    proposed = {
        "sft": [
            f"rft-train generate --pretrain {model}",
            f"rft-train rl --pretrain {model}",
            "rft-train runs show run",
        ],
        "rl": ["rft-train eval run --eval_data test.jsonl", "rft-train runs show run", "rft-train rl --help"],
    }
    assert [words.partition(" --prompt")[0] for words, _ in nexts] == proposed[command]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_end_is_shown_by_the_rank_that_has_a_summary_and_where_it_is_wanted(
    command: str, calls: list[tuple[Any, ...]]
) -> None:
    resolved = resolve(command, ["--pretrain", "m"])
    assert training.train(resolved, ["again"], in_place=Path("old"), show_end=False) == Path("run")
    assert training.train(resolved, ["again"]) == Path("run")
    assert calls == [(command, "m", ["again"], Path("old"), "front"), (command, "m", ["again"], None, "front")]
