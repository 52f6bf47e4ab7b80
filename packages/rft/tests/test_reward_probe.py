"""Test of a reward model by itself: pairs from a file, figures of its scores, and scores that are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft import reward_probe
from rft.reward_probe import Pair, probe_reward_model, read_pairs
from rft_algos.statistics import wilson_interval
from rft_core.errors import DataError, PreflightError


class Scorer:
    """Scores a response by a function of (its text, the number of the call, the responses of the call)."""

    def __init__(self, score: Callable[[str, int, int], Any], weights: Any, heads: tuple[str, ...]) -> None:
        self._score = score
        self.heads = heads
        self.model = SimpleNamespace(spec=SimpleNamespace(weights=weights, heads=list(heads), pooling="last"))
        self.asked: list[Any] = []

    def score(self, prompts: Any, messages: Any, texts: Any) -> list[Any]:
        self.asked.append((prompts, messages, texts))
        return [self._score(text, len(self.asked), len(texts)) for text in texts]


def probed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    score: Callable[[str, int, int], Any],
    *,
    rows: list[Any] | None = None,
    weights: Any = (1.0,),
    heads: tuple[str, ...] = ("score",),
) -> tuple[Any, Scorer]:
    scorer = Scorer(score, weights, heads)
    monkeypatch.setattr(reward_probe, "load_reward_model", lambda directory: directory)
    monkeypatch.setattr(reward_probe, "RewardTextScorer", lambda model: scorer if model == "dir" else None)
    file = None
    if rows is not None:
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps({"prompt": "p", "chosen": a, "rejected": b}) + "\n" for a, b in rows))
    return probe_reward_model("dir", file), scorer


def number(text: str, *_: int) -> dict[str, float]:
    return {"score": float(text)}


def test_figures_are_those_of_the_pairs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [("3", "1"), ("2", "2"), ("-1", "5"), ("4", "0")]
    report, scorer = probed(monkeypatch, tmp_path, number, rows=rows)
    assert (report.heads, report.pooling, report.num_right) == (("score",), "last", 2)
    assert report.figures == {
        "pairs": 4,
        "prefers_chosen": 0.5,
        "mean_margin": (2 + 0 - 6 + 4) / 4,
        "lowest": -1.0,
        "highest": 5.0,
        "difference_alone": 0.0,
    }
    assert report.right_interval == wilson_interval(2, 4)
    assert scorer.asked[:2] == [
        (["p"] * 4, [()] * 4, ["3", "2", "-1", "4"]),
        (["p"] * 4, [()] * 4, ["1", "2", "5", "0"]),
    ]


@pytest.mark.parametrize(("weights", "margin"), [((2.0, 3.0), 2 * 2 + 3 * 20), (None, 2 + 20)])
def test_heads_are_summed_by_their_weights_or_once_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: Any, margin: float
) -> None:
    report, _ = probed(
        monkeypatch,
        tmp_path,
        lambda text, *_: {"b": 10 * float(text), "a": float(text)},
        rows=[("3", "1")],
        weights=weights,
        heads=("a", "b"),
    )
    assert report.figures["mean_margin"] == margin


def test_without_a_file_sums_are_scored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report, scorer = probed(monkeypatch, tmp_path, number)
    assert report.figures["pairs"] == 6
    prompts, messages, chosen = scorer.asked[0]
    _, _, rejected = scorer.asked[1]
    assert prompts == ["1+1=", "2+3=", "4+4=", "12+7=", "20+22=", "35+14="]
    assert messages == [()] * 6
    sums = [sum(map(int, prompt.removesuffix("=").split("+"))) for prompt in prompts]
    assert (chosen, rejected) == ([str(total) for total in sums], [str(total + 1) for total in sums])
    assert (report.num_right, report.figures["mean_margin"]) == (0, -1.0)


def twice(gap: float) -> Callable[[str, int, int], Any]:
    """Scores that are larger in the second pass over the batch."""
    return lambda text, call, count: {"score": float(text) + (gap if call > 2 and count > 1 else 0.0)}


def alone(gap: float) -> Callable[[str, int, int], Any]:
    """Scores that are larger where a response is by itself."""
    return lambda text, call, count: {"score": float(text) + (gap if count == 1 else 0.0)}


@pytest.mark.parametrize(
    ("score", "rows", "fits"),
    [
        (number, [("1", "1"), ("1", "1")], False),
        (lambda text, *_: {"score": math.nan}, [("1", "2")], False),
        (lambda text, *_: {"score": math.inf if text == "2" else 1.0}, [("1", "2")], False),
        (lambda text, *_: "too long", [("1", "2")], False),
        (twice(1e-9), [("1", "2"), ("3", "4")], False),
        (alone(0.5e-4), [("0.1", "0.2"), ("0.3", "0.4")], True),
        (alone(2e-4), [("0.1", "0.2"), ("0.3", "0.4")], False),
        (alone(2e-4), [("1", "2"), ("3", "-4")], True),
        (alone(5e-4), [("1", "2"), ("3", "-4")], False),
    ],
)
def test_scores_that_cannot_be_trained_on_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, score: Any, rows: list[Any], fits: bool
) -> None:
    if fits:
        report, _ = probed(monkeypatch, tmp_path, score, rows=rows)
        assert report.figures["difference_alone"] > 0.0
        return
    with pytest.raises(PreflightError) as caught:
        probed(monkeypatch, tmp_path, score, rows=rows)
    assert caught.value.problem.code == "reward.model_unfit"


def test_pairs_are_rows_of_texts_or_of_conversations(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant"}, {"role": "user", "content": "b"}]
    rows = [{"prompt": "p", "chosen": "x", "rejected": "y"}, {"prompt": turns, "chosen": "\u00e4", "rejected": ""}]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert read_pairs(file) == [Pair("p", (), "x", "y"), Pair("a\n\nb", tuple(turns), "\u00e4", "")]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"prompt": "p", "chosen": "x"}',
        '{"prompt": "p", "chosen": 1, "rejected": "y"}',
        '{"prompt": [1], "chosen": "x", "rejected": "y"}',
        '{"prompt": "p", "chosen": "x", "rejected": null}',
        "[]",
        "",
        '{"prompt": null, "chosen": "x", "rejected": "y"}',
        '{"prompt": 5, "chosen": "x", "rejected": "y"}',
        '{"prompt": [], "chosen": "x", "rejected": "y"}',
    ],
)
def test_a_row_without_its_texts_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "p", "chosen": "x", "rejected": "y"}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        read_pairs(file)
    assert (caught.value.problem.code, caught.value.problem.where) == ("data.pair", f"{file}:2")


@pytest.mark.parametrize(("content", "line"), [(b"", 1), (b"\n", 1), (b'{"prompt": "p", "chosen": "\xff"}\n', 1)])
def test_a_file_without_a_row_or_in_another_encoding_is_named_too(tmp_path: Path, content: bytes, line: int) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_pairs(file)
    assert (caught.value.problem.code, caught.value.problem.where) == ("data.pair", f"{file}:{line}")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_a_text_may_hold_any_separator_of_lines(tmp_path: Path, separator: str, end: str) -> None:
    file = tmp_path / "pairs.jsonl"
    row = json.dumps({"prompt": "p", "chosen": "XY", "rejected": "y"}).replace("XY", f"x{separator}y")
    file.write_bytes(row.encode() + end.encode())
    assert read_pairs(file) == [Pair("p", (), f"x{separator}y", "y")]
