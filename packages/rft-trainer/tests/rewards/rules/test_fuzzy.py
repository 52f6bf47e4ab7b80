"""Similarity of answer and label: words as SQuAD, characters as difflib."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.registry import reward_by_name
from rft_trainer.rewards.rules.fuzzy import judge, token_f1

MakeItem = Callable[..., RewardItem]


@pytest.mark.parametrize(
    ("answer", "label", "f1"),
    [("a b", "a b", 1.0), ("a b", "b c d", 0.4), ("a a", "a", 2 / 3), ("a", "b", 0.0), ("", "", 1.0), ("", "a", 0.0)],
)
def test_f1_counts_shared_words(answer: str, label: str, f1: float) -> None:
    assert token_f1(answer.split(), label.split()) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("response", "labels", "measure", "expected"),
    [
        ("The cat sat.", ["a Cat sat!"], "f1", {"reward": 1.0, "f1": 1.0, "ratio": 1.0, "correctness": 1.0}),
        ("abcd", ["bcde"], "ratio", {"reward": 0.75, "f1": 0.0, "ratio": 0.75, "correctness": 0.0}),
        ("so <answer>York</answer>", ["york"], "f1", {"reward": 1.0, "f1": 1.0, "ratio": 1.0, "correctness": 1.0}),
    ],
)
def test_parts_of_a_judgement(response: str, labels: list[str], measure: str, expected: dict[str, float]) -> None:
    assert judge({"response": response, "labels": labels, "measure": measure}) == expected


def test_the_nearest_of_several_labels_counts() -> None:
    labels = ["red", "light blue", "blue"]
    assert judge({"response": "blue", "labels": labels, "measure": "f1"})["correctness"] == 1.0
    assert judge({"response": "light green", "labels": labels, "measure": "f1"})["reward"] == pytest.approx(0.5)


def test_responses_are_judged_in_a_process_and_one_without_a_label_has_no_reward(make_item: MakeItem) -> None:
    reward = reward_by_name("fuzzy")
    try:
        items = [make_item("new york", "New York City"), make_item("x", None), make_item("b", "a")]
        right, none, several = reward([*items[:2], replace(items[2], label=["c", "B"])])
    finally:
        reward.close()
    assert right.value == pytest.approx(0.8)
    assert (none.value, none.status) == (None, RewardStatus.UNPARSABLE)
    assert several.breakdown == {"f1": 1.0, "ratio": 1.0, "correctness": 1.0}
