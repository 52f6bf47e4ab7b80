"""Controls whose answers say nothing: the noise follows from key and turn, the reward is that of the game."""

from __future__ import annotations

from rft_core.keyed_random import derive_key, integers
from rft_trainer.environments.noise_controls import NoisyCalculator, NoisyHints
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt, ToolCall

CALL = ToolCall("calculator", {"expression": "1+1"})


def test_calls_are_answered_by_random_numbers_of_four_digits_by_turn() -> None:
    game = NoisyCalculator()
    for key in (3, 4):
        assert game.reset(EnvironmentPrompt("p", "?", "2"), key) == ()
        told = [game.step(AssistantTurn("", (CALL,) * num)).messages for num in (3, 1)]
        expected = [integers(derive_key(key, "noise", turn), num, 1_000, 10_000) for turn, num in ((1, 3), (2, 1))]
        assert told == [[str(number) for number in drawn.tolist()] for drawn in expected]
    assert game.step(AssistantTurn("2")) == Answer([], 1.0, True, {"correctness": 1.0})


def test_hints_are_random_by_turn_and_other_answers_are_those_of_the_game() -> None:
    game = NoisyHints()
    hints: list[str] = []
    for key in (3, 4):
        assert game.reset(EnvironmentPrompt("p", "", "500"), key) == ()
        told = [str(game.step(AssistantTurn("7")).messages[0]) for _ in range(12)]
        coins = [int(integers(derive_key(key, "noise", turn), 1, 0, 2)) for turn in range(1, 13)]
        assert told == [("lower", "higher")[coin] for coin in coins]
        hints += told
    assert set(hints) == {"lower", "higher"}
    assert game.step(AssistantTurn("hm")).messages == ["no number"]
    assert game.step(AssistantTurn("500")) == Answer([], 1.0, True, {"correctness": 1.0})
