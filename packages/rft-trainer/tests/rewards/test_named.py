"""A reward beside others: its value and its parts stand under its name."""

from __future__ import annotations

from collections.abc import Sequence

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.combined import CombinedReward, RewardComponent
from rft_trainer.rewards.named import NamedReward

ITEM = RewardItem("p", "?", "x", "1", "stop", 1)


class Given:
    def __init__(self, score: Score) -> None:
        self.score, self.closed = score, False

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self.score for _ in items]

    def close(self) -> None:
        self.closed = True


def test_value_and_parts_stand_under_the_name() -> None:
    given = Given(Score(0.5, breakdown={"a": 1.0, "own": 0.5}, steps=((1, 0.5),)))
    reward = NamedReward("own", given)
    assert reward([ITEM]) == [Score(0.5, breakdown={"own": 0.5, "own/a": 1.0}, steps=((1, 0.5),))]
    reward.close()
    assert given.closed


def test_a_response_without_a_score_has_no_value_under_the_name() -> None:
    late = Score(None, RewardStatus.TIMEOUT, detail="late", breakdown={"a": 1.0})
    [score] = NamedReward("own", Given(late))([ITEM])
    assert (score.value, score.status, score.breakdown) == (None, RewardStatus.TIMEOUT, {"own/a": 1.0})


def test_two_rewards_with_a_part_of_one_name_keep_both() -> None:
    parts = [
        RewardComponent(name, NamedReward(name, Given(Score(value, breakdown={"correctness": value}))))
        for name, value in (("a", 1.0), ("b", 0.25))
    ]
    for weights, value in ((None, 1.25), ({"a": 0.5, "b/correctness": 2.0}, 1.0)):
        [score] = CombinedReward(parts, weights)([ITEM])
        assert score.value == value
        assert score.breakdown == {"a": 1.0, "a/correctness": 1.0, "b": 0.25, "b/correctness": 0.25}
