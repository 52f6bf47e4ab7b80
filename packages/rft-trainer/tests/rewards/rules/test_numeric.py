"""Numbers as people write them, compared within a tolerance."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.registry import reward_by_name
from rft_trainer.rewards.rules.numeric import last_number

MakeItem = Callable[..., RewardItem]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so it is 18", Fraction(18)),
        ("10 and then 1,234.50 dollars.", Fraction("1234.5")),
        ("-$5", Fraction(-5)),
        ("\u22124", Fraction(-4)),
        ("3-5", Fraction(5)),
        ("x=-5", Fraction(-5)),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("2 1/2", Fraction(5, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("1.5e-3", Fraction(15, 10000)),
        (r"1.5 \times 10^{3}", Fraction(1500)),
        ("2*10^-1", Fraction(1, 5)),
        (".5", Fraction(1, 2)),
        ("10.", Fraction(10)),
        ("#### 7 of 8\nin all 9", Fraction(8)),
        (r"\boxed{7} and 9", Fraction(7)),
        ("<answer>7</answer> and 9", Fraction(7)),
        ("7 or 1/0", Fraction(7)),
        ("7 or 1e999999999999", Fraction(7)),
        ("none", None),
        (r"\boxed{none} of 9", None),
        ("", None),
    ],
)
def test_the_last_number_of_the_answer_is_read(text: str, value: Fraction | None) -> None:
    found = last_number(text)
    assert (None if found is None else found.value) == value


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("50%", "50%", True),
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("0.5", "50%", True),
        ("0.5%", "50%", False),
        ("1000000.9", "1000000", True),
        ("1000001.1", "1000000", False),
        ("0.3333333", "1/3", True),
        ("0.333", "1/3", False),
        ("nothing", "1", False),
    ],
)
def test_a_number_is_right_within_the_relative_tolerance(
    make_item: MakeItem, response: str, label: str, right: bool
) -> None:
    [score] = reward_by_name("numeric")([make_item(response, label)])
    assert (score.value, score.breakdown) == (float(right), {"correctness": float(right)})


def test_tolerances_are_exact_and_the_larger_counts(make_item: MakeItem) -> None:
    absolute = reward_by_name("numeric", options={"number_tolerance": 0.01, "number_relative_tolerance": 0.0})
    assert [score.value for score in absolute([make_item("1.01", "1"), make_item("1.0101", "1")])] == [1.0, 0.0]
    relative = reward_by_name("numeric", options={"number_tolerance": 0.01, "number_relative_tolerance": 0.1})
    assert [score.value for score in relative([make_item("-110", "-100"), make_item("110.1", "100")])] == [1.0, 0.0]


def test_a_label_without_a_number_cannot_be_compared(make_item: MakeItem) -> None:
    for label in ("many", "", None):
        [score] = reward_by_name("numeric")([make_item("5", label)])
        assert score.status is RewardStatus.UNPARSABLE


def test_long_texts_are_read_at_their_end_alone() -> None:
    assert last_number("1," * 500_000 + " 7") == last_number("7")
    assert last_number("1" * 1_000_000) is not None
    assert last_number("1,111" * 300_000 + "x" * 1000) is None
