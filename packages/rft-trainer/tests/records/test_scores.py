"""A score is a finite number with the status ok, or a status without a number."""

from __future__ import annotations

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus, Score, remedy_of


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


def test_the_remedy_of_missing_rewards_follows_from_most_of_their_statuses() -> None:
    def of(*statuses: RewardStatus, is_resumed: bool = True) -> str:
        return remedy_of([str(status) for status in statuses], "rft-train resume r", is_resumed=is_resumed)

    failed, silent = RewardStatus.FAILED, RewardStatus.NO_VERDICT
    assert of(failed, silent, failed).startswith("repair the reward, then rft-train resume r (where")
    assert of(failed, is_resumed=False) == "repair the reward, then rft-train resume r"
    of_a_judge = of(silent, failed, silent)
    assert "repair the reward" not in of_a_judge
    assert all(name in of_a_judge for name in ("rft-train resume r", "--judge_pattern", "--judge_template"))
    assert "accept_changes" in of_a_judge
    assert "accept_changes" not in of(silent, is_resumed=False)
