"""The form of a response: every tag once, in order, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.registry import reward_by_name

MakeItem = Callable[..., RewardItem]


@pytest.mark.parametrize(
    ("response", "value", "tags", "order"),
    [
        ("<think>a</think><answer>b</answer>", 1.0, 1.0, 1.0),
        (" <think>\na\n</think>\n<answer>b</answer>\n", 1.0, 1.0, 1.0),
        ("<think></think><answer></answer>", 1.0, 1.0, 1.0),
        ("<answer>b</answer><think>a</think>", 0.0, 1.0, 0.0),
        ("<think>a<answer>b</answer></think>", 0.0, 1.0, 0.0),
        ("so <think>a</think><answer>b</answer>", 0.0, 1.0, 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0, 1.0, 0.0),
        ("<think>a</think><answer>b</answer> so", 0.0, 1.0, 0.0),
        ("<think>a</think>b", 0.0, 0.5, 0.0),
        ("</think>a<think><answer>b</answer>", 0.0, 0.5, 0.0),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0.0, 0.5, 0.0),
        ("<think>a</think></think><answer>b", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_each_tag_stands_once_and_nothing_around_them(
    make_item: MakeItem, response: str, value: float, tags: float, order: float
) -> None:
    [score] = reward_by_name("format")([make_item(response, None)])
    assert (score.value, score.breakdown) == (value, {"tags": tags, "order": order})


def test_tags_are_those_of_the_settings(make_item: MakeItem) -> None:
    reward = reward_by_name("format", options={"format_tags": "plan, code,answer"})
    right, wrong = reward(
        [make_item("<plan>1</plan><code>2</code><answer>3</answer>"), make_item("<think>a</think><answer>b</answer>")]
    )
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert wrong.breakdown["tags"] == pytest.approx(1 / 3)
