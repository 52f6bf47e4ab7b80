"""A score is a finite number with the status ok, or a status without a number."""

from __future__ import annotations

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus, Score


@pytest.mark.parametrize("status", list(RewardStatus))
def test_a_value_goes_with_the_status_ok_alone(status: RewardStatus) -> None:
    is_ok = status is RewardStatus.OK
    assert Score(0.0 if is_ok else None, status).status is status
    with pytest.raises(ValueError, match="goes with ok alone"):
        Score(None if is_ok else 0.0, status)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_is_finite(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        Score(value)


def test_a_score_of_a_number_alone_is_ok_and_has_no_parts() -> None:
    score = Score(1.5)
    assert (score.status, score.breakdown, score.steps, score.detail) == (RewardStatus.OK, {}, (), "")


@pytest.mark.parametrize(
    ("label", "text"),
    [("7", "7"), (None, None), (7, "7"), (0.5, "0.5"), ({"a": "\u00e4"}, '{"a": "\u00e4"}'), ([1], "[1]")],
)
def test_a_label_that_is_no_text_is_shown_as_json(label: object, text: str | None) -> None:
    assert RewardItem("p", "?", "x", label, "stop", 1).label_text == text
