"""The words of the test of a reward model, with a double of the test."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_cli.commands import reward_probe
from rft_core.errors import OptionsError

FIGURES = {"pairs": 4.0, "mean_margin": 0.5, "lowest": -1.0, "highest": 2.0}


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was scored."""
    asked: list[Any] = []

    def probe(model: str, pairs: Path | None) -> Any:
        asked.append((model, pairs))
        interval = SimpleNamespace(low=0.1, high=0.9)
        return SimpleNamespace(figures=FIGURES, right_interval=interval, heads=["score"], pooling="last", num_right=3)

    monkeypatch.setattr(reward_probe, "probe_reward_model", probe)
    return asked


@pytest.mark.parametrize(
    ("words", "scored"),
    [(["--model", "m"], ("m", None)), (["--pairs", "a.jsonl", "--model=m"], ("m", Path("a.jsonl")))],
)
def test_a_model_is_scored_and_its_figures_are_the_last_line(
    words: list[str], scored: tuple[str, Path | None], probed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert reward_probe.main(words) == 0
    assert probed == [scored]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == FIGURES


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--pairs", "a"], "option.required"),
        (["--model", "m", "more"], "option.stray"),
        (["--modle", "m"], "option.unknown"),
    ],
)
def test_words_that_name_no_model_are_refused(words: list[str], code: str, probed: list[Any]) -> None:
    with pytest.raises(OptionsError) as caught:
        reward_probe.main(words)
    assert caught.value.problem.code == code
    assert probed == []


@pytest.mark.parametrize("words", [[], ["-h"], ["--model", "m", "--help"]])
def test_help_scores_nothing(words: list[str], probed: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert reward_probe.main(words) == 0
    assert capsys.readouterr().out.startswith("usage: ")
    assert probed == []
