"""Multiple choice: what a response chooses, and what a label stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.registry import reward_by_name
from rft_trainer.rewards.rules.choice import chosen_letter, letter_of_label

MakeItem = Callable[..., RewardItem]
CITIES = ["Rome", "Paris", "The Hague"]


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        (" b. ", "B"),
        ("(B) Paris", "B"),
        ("B) Paris", "B"),
        ("The answer is B because of C", "B"),
        ("the answer is (B).", "B"),
        ("Answer: **B**", "B"),
        ("First I chose (A), now (C).", "C"),
        ("answer is A. No: the answer is D", "D"),
        (r"So \boxed{B}, not (C)", "B"),
        (r"\boxed{\text{B}}", "B"),
        ("#### B", "B"),
        ("<think>(A)</think><answer>(B) Paris</answer>", "B"),
        ("A dog barks", None),
        ("I think so", None),
        ("the answer is Because", None),
        ("", None),
    ],
)
def test_the_choice_of_a_response(response: str, letter: str | None) -> None:
    assert chosen_letter(response, []) == letter


@pytest.mark.parametrize(
    ("response", "letter"), [("paris", "B"), ("<answer>Hague</answer>", "C"), (r"\boxed{Rome.}", "A"), ("Oslo", None)]
)
def test_the_text_of_an_option_chooses_it(response: str, letter: str | None) -> None:
    assert chosen_letter(response, CITIES) == letter


@pytest.mark.parametrize(
    ("label", "options", "letter"),
    [
        ("B", [], "B"),
        (" (b) ", [], "B"),
        ("#### C", [], "C"),
        ("1", [], "B"),
        (1, [], "B"),
        (0, CITIES, "A"),
        ("The Hague", CITIES, "C"),
        ("hague", CITIES, "C"),
        ("2", ["1", "2", "3"], "B"),
        (2, ["1", "2", "3"], "C"),
        ("D", CITIES, None),
        (3, CITIES, None),
        (-1, [], None),
        (True, [], None),
        (None, [], None),
        ("Oslo", CITIES, None),
        ("x", ["x", "x"], None),
    ],
)
def test_a_label_is_a_letter_an_index_or_an_option(label: Any, options: list[str], letter: str | None) -> None:
    assert letter_of_label(label, options) == letter


@pytest.mark.parametrize(
    "options", [CITIES, {"text": CITIES, "label": ["A", "B", "C"]}, dict(zip("ABC", CITIES, strict=True))]
)
def test_options_stand_in_a_column(make_item: MakeItem, options: Any) -> None:
    reward = reward_by_name("choice", options={"choice_options_key": "options"})
    items = [replace(make_item(response, "Paris"), columns={"options": options}) for response in ("B", "Paris", "C")]
    assert [score.value for score in reward(items)] == [1.0, 1.0, 0.0]


def test_a_row_without_options_or_with_another_label_has_no_reward(make_item: MakeItem) -> None:
    reward = reward_by_name("choice", options={"choice_options_key": "options"})
    items = [replace(make_item("B", "Oslo"), columns=columns) for columns in ({}, {"options": 3}, {"options": CITIES})]
    scores = reward(items)
    assert [score.status for score in scores] == [RewardStatus.UNPARSABLE] * 3
    assert "options holds no options" in scores[0].detail
    assert "no option" in scores[2].detail
