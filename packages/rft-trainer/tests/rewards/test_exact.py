"""Exact match, letter for letter, white space around it aside."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.exact import ExactReward

MakeItem = Callable[..., RewardItem]


@pytest.mark.parametrize(
    ("response", "label", "value"), [(" a\n", "a", 1.0), ("a", " a\n", 1.0), ("a b", "ab", 0.0), ("", "", 1.0)]
)
def test_equal_texts_are_right(make_item: MakeItem, response: str, label: str, value: float) -> None:
    reward = ExactReward()
    assert reward([make_item(response, label)]) == [Score(value, breakdown={"correctness": value})]
    reward.close()


def test_a_response_without_a_label_has_no_reward_and_says_why(make_item: MakeItem) -> None:
    first, second = ExactReward()([make_item("a", None), make_item("a", "a")])
    assert (first.value, first.status, bool(first.detail)) == (None, RewardStatus.UNPARSABLE, True)
    assert second.value == 1.0
