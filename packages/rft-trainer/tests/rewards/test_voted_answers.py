"""Answers as votes: responses that say the same have equal answers."""

from __future__ import annotations

import pytest

from rft_trainer.rewards.voted_answers import answer_reader


@pytest.mark.parametrize(
    ("reward", "response", "expected"),
    [
        ("exact", " 12\n", "12"),
        ("exact", "  ", None),
        ("math", r"so \boxed{0.5}", "1/2"),
        ("math", "#### 1,000", "1000"),
        ("math", r"\boxed{ x + 1 }", "x+1"),
        ("math", "it is 5", None),
        ("math", r"\boxed{}", None),
        ("gsm8k", "#### 18 dollars", "18"),
        ("math", "#### 18 dollars", "18dollars"),
        ("choice", "The answer is (B).", "B"),
        ("choice", "b", "B"),
        ("choice", r"\boxed{0.5}", "1/2"),
        ("choice", "none of these", None),
        ("file.py:own", "#### 7", "7"),
        ("file.py:own", "seven", "seven"),
        ("", " ", None),
    ],
)
def test_answers_are_read_as_the_reward_compares_them(reward: str, response: str, expected: str | None) -> None:
    assert answer_reader(reward)(response) == expected
