"""The number of a guessing game, and the answers to guesses."""

from __future__ import annotations

import pytest

from rft_trainer.environments.guess_number import GuessNumber
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt


def number_of(text: str, label: str | None, key: int) -> int:
    """The number to be guessed, found by the hints alone."""
    game, low, high = GuessNumber(), 0, 999_999
    assert game.reset(EnvironmentPrompt("p", text, label), key) == ()
    while True:
        middle = (low + high) // 2
        answer = game.step(AssistantTurn(str(middle)))
        if answer.done:
            return middle
        low, high = (middle + 1, high) if answer.messages == ["higher"] else (low, middle - 1)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("a number", set(range(1, 8))),
        ("from 23 to 29", set(range(23, 30))),
        ("from 9 to 9", {9}),
        ("from 9 to 5", {9}),
        ("from 5 to 6, not 1 to 9", {5, 6}),
    ],
)
def test_a_number_without_a_label_is_drawn_from_the_named_range_by_the_key(text: str, numbers: set[int]) -> None:
    assert {number_of(text, None, key) for key in range(60)} == numbers
    assert {number_of(text, "no number", key) for key in range(60)} == numbers
    assert number_of(text, None, 5) == number_of(text, None, 5)


def test_the_label_is_the_number() -> None:
    assert {number_of("from 1 to 3", "123456", key) for key in range(5)} == {123_456}


def test_the_last_number_of_a_turn_is_the_guess() -> None:
    game = GuessNumber()
    game.reset(EnvironmentPrompt("p", "", "5"), 0)
    assert game.step(AssistantTurn("5 or 6")) == Answer(messages=["lower"])
    assert game.step(AssistantTurn("5 or 4")) == Answer(messages=["higher"])
    assert game.step(AssistantTurn("no")) == Answer(messages=["no number"])
    assert game.step(AssistantTurn("4 or 5")) == Answer(reward=1.0, done=True, parts={"correctness": 1.0})
