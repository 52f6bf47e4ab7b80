"""The length of a response within a range, and the slope outside of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.registry import reward_by_name
from rft_trainer.rewards.rules.length import LengthReward

MakeItem = Callable[..., RewardItem]


@pytest.mark.parametrize(
    ("number", "high", "slack", "value"),
    [
        (4, 6, 4, 1.0),
        (6, 6, 4, 1.0),
        (7, 6, 4, 0.75),
        (10, 6, 4, 0.0),
        (99, 6, 4, 0.0),
        (3, 6, 4, 0.75),
        (0, 6, 4, 0.0),
        (7, 6, 0, 0.0),
        (3, 6, 0, 0.0),
        (99, 0, 4, 1.0),
    ],
)
def test_the_reward_falls_over_the_slack(make_item: MakeItem, number: int, high: int, slack: int, value: float) -> None:
    [score] = LengthReward(4, high, slack=slack)([replace(make_item("text"), num_tokens=number)])
    assert (score.value, score.breakdown) == (value, {"length": value})


def test_characters_or_tokens_are_counted(make_item: MakeItem) -> None:
    item = replace(make_item("four"), num_tokens=1)
    for unit, value in (("tokens", 0.0), ("characters", 1.0)):
        options = {"length_range": (3, 5), "length_unit": unit}
        assert [score.value for score in reward_by_name("length", options=options)([item])] == [value]
