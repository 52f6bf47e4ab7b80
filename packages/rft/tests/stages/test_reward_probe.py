"""Test of a reward model by itself: pairs from a file, figures of its scores, and scores that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rft.stages import reward_probe
from rft.stages.reward_probe import Pair, agreement, probe_reward_model
from rft_algos.statistics import wilson_interval
from rft_core.errors import PreflightError
from rft_models.reward_model.spec import RewardSpec


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
    score: Callable[[str, int, int], Any],
    *,
    rows: list[Any] | None = None,
    pairs: list[Pair] | None = None,
    weights: Any = (1.0,),
    heads: tuple[str, ...] = ("score",),
) -> tuple[Any, Scorer]:
    scorer, loaded = Scorer(score, weights, heads), SimpleNamespace(spec=RewardSpec())
    monkeypatch.setattr(
        reward_probe, "load_reward_model", lambda directory, **_: loaded if directory == "dir" else None
    )
    monkeypatch.setattr(reward_probe, "RewardTextScorer", lambda model: scorer if model is loaded else None)
    if rows is not None:
        pairs = [Pair("p", (), a, b) for a, b in rows]
    return probe_reward_model("dir", pairs), scorer


def number(text: str, *_: int) -> dict[str, float]:
    return {"score": float(text)}


def test_figures_are_those_of_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("3", "1"), ("2", "2"), ("-1", "5"), ("4", "0")]
    report, scorer = probed(monkeypatch, number, rows=rows)
    assert (report.heads, report.pooling, report.num_right) == (("score",), "last", 2)
    assert report.figures == {
        "pairs": 4,
        "prefers_chosen": 0.5,
        "mean_margin": (2 + 0 - 6 + 4) / 4,
        "lowest": -1.0,
        "highest": 5.0,
        "difference_alone": 0.0,
        "calibration_error": report.figures["calibration_error"],
    }
    assert 0 < report.figures["calibration_error"] < 1
    assert report.right_interval == wilson_interval(2, 4)
    assert scorer.asked[:2] == [
        (["p"] * 4, [()] * 4, ["3", "2", "-1", "4"]),
        (["p"] * 4, [()] * 4, ["1", "2", "5", "0"]),
    ]


@pytest.mark.parametrize(("weights", "margin"), [((2.0, 3.0), 2 * 2 + 3 * 20), (None, 2 + 20)])
def test_heads_are_summed_by_their_weights_or_once_each(
    monkeypatch: pytest.MonkeyPatch, weights: Any, margin: float
) -> None:
    report, _ = probed(
        monkeypatch,
        lambda text, *_: {"b": 10 * float(text), "a": float(text)},
        rows=[("3", "1")],
        weights=weights,
        heads=("a", "b"),
    )
    assert report.figures["mean_margin"] == margin


def test_without_a_file_sums_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    report, scorer = probed(monkeypatch, number)
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
    monkeypatch: pytest.MonkeyPatch, score: Any, rows: list[Any], fits: bool
) -> None:
    if fits:
        report, _ = probed(monkeypatch, score, rows=rows)
        assert report.figures["difference_alone"] > 0.0
        return
    with pytest.raises(PreflightError) as caught:
        probed(monkeypatch, score, rows=rows)
    assert caught.value.problem.code == "reward.model_unfit"


def test_the_outcome_says_which_response_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [Pair("p", (), "3", "1", outcome) for outcome in (1.0, -1.0, 0.0, 2.0)]
    report, _ = probed(monkeypatch, number, pairs=pairs)
    assert (report.num_right, report.num_decided) == (1, 2)
    assert [(one.num, one.observed) for one in report.calibration] == [(2, 0.5)]
    assert report.figures["calibration_error"] == pytest.approx(1 / (1 + math.exp(-2)) - 0.5)


def test_models_agree_where_they_prefer_the_same_response(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [Pair("p", (), a, b) for a, b in (("3", "1"), ("2", "1"), ("1", "4"), ("1", "5"))]
    one, _ = probed(monkeypatch, number, pairs=pairs)
    # the other prefers the longer text of these: it differs in the second pair alone
    preferred = {"3": 1.0, "2": 0.0, "1": 0.5, "4": 2.0, "5": 3.0}
    other, _ = probed(monkeypatch, lambda text, *_: {"score": preferred[text]}, pairs=pairs)
    found = agreement(one, other)
    assert (found.num_same, found.num_pairs) == (3, 4)
    by_chance = 0.5 * 0.25 + 0.5 * 0.75
    assert found.kappa == pytest.approx((0.75 - by_chance) / (1 - by_chance))
