"""Dialogues follow from the seed, show the habits that they promise, and leave what is evaluated out."""

from __future__ import annotations

import random
import re
from collections import Counter
from fractions import Fraction

import pytest

from rft_trainer.environments.calculator import Calculator
from rft_trainer.environments.guess_number import GuessNumber
from rft_trainer.environments.noise_controls import NoisyCalculator, NoisyHints
from rft_trainer.environments.protocol import AssistantTurn, EnvironmentPrompt, ToolCall
from rft_trainer.environments.tool_calls import ToolCallFormat
from rft_trainer.tasks import calculator_dialogues, guess_number_dialogues
from rft_trainer.tasks.calculator_dialogues import Row
from rft_trainer.tasks.guess_number_dialogues import GAME, Game, blind_chance, heedful_chance


def ranges(rows: tuple[Row, ...]) -> set[tuple[int, int]]:
    """Of the questions."""
    found = [re.search(r"from (\d+) to (\d+)", row["input"][0]["content"]) for row in rows]
    return {(int(match[1]), int(match[2])) for match in found if match}


def test_calculations_show_the_habits_in_their_shares() -> None:
    made = calculator_dialogues.calculator(0, num_demonstrations=400)
    assert made == calculator_dialogues.calculator(0, num_demonstrations=400)
    assert made.train != calculator_dialogues.calculator(1, num_demonstrations=400).train
    first = [row for row in made.demonstrations if len(row["input"]) == 1]
    parsed = [ToolCallFormat().parse(row["output"]) for row in first]
    assert sum(bool(one.calls) for one in parsed) / len(first) == pytest.approx(
        calculator_dialogues.SHARE_CALLS, abs=0.06
    )
    assert sum(bool(one.problems) for one in parsed) / len(first) == pytest.approx(
        calculator_dialogues.SHARE_MALFORMED, abs=0.06
    )
    asked = {row["input"][0]["content"] for row in made.train}
    assert asked.isdisjoint(row["input"][0]["content"] for row in made.held_out)


def test_no_range_that_is_evaluated_is_in_a_row_to_train_on() -> None:
    made = guess_number_dialogues.guess_number(0, num_demonstrations=300)
    assert made == guess_number_dialogues.guess_number(0, num_demonstrations=300)
    assert made.held_out != guess_number_dialogues.guess_number(1, num_demonstrations=300).held_out
    held_out = ranges(made.held_out)
    assert held_out.isdisjoint(ranges(made.train))
    assert held_out.isdisjoint(ranges(made.demonstrations))
    assert len(held_out) == round(guess_number_dialogues.SHARE_HELD_OUT * len(GAME.starts))
    assert len(held_out) + len(ranges(made.train)) == len(GAME.starts)
    for rows in (made.train, made.held_out):  # each number of each range once
        asked = Counter((row["input"][0]["content"], row["label"]) for row in rows)
        assert set(asked.values()) == {1}
        assert len(rows) == GAME.width * len(ranges(rows))


def test_heedless_guesses_are_any_number_of_the_range() -> None:
    made = guess_number_dialogues.guess_number(0, num_demonstrations=4_000, share_heedful=0.0)
    places: dict[str, Counter[int]] = {"": Counter(), "higher": Counter(), "lower": Counter()}
    for row in made.demonstrations:
        ((low, high),) = ranges((row,))
        assert low <= int(row["output"]) <= high
        told = "" if len(row["input"]) == 1 else row["input"][-1]["content"]
        places[told][int(row["output"]) - low] += 1
    for told, counted in places.items():
        shares = [counted[place] / counted.total() for place in range(GAME.width)]
        assert shares == pytest.approx([1 / GAME.width] * GAME.width, abs=0.025), told
    assert max(len(row["input"]) for row in made.demonstrations) == 2 * GAME.turns - 1


def allowed(row: Row) -> bool:
    """Whether the guess is a number that the answers before it leave."""
    ((low, high),) = ranges((row,))
    said, heard = row["input"][1::2], row["input"][2::2]
    for guess, answer in zip(said, heard, strict=True):
        number = int(guess["content"])
        low, high = (max(low, number + 1), high) if answer["content"] == "higher" else (low, min(high, number - 1))
    return low <= int(row["output"]) <= high


def test_heedful_guesses_are_what_the_answers_leave() -> None:
    shares: list[float] = []
    for share in (0.0, guess_number_dialogues.SHARE_HEEDFUL, 1.0):
        made = guess_number_dialogues.guess_number(0, num_demonstrations=1_000, share_heedful=share)
        second = [row for row in made.demonstrations if len(row["input"]) == 3]
        shares.append(sum(map(allowed, second)) / len(second))
    blind = 13 / 21  # the mean share of the numbers that are left, before a second guess that heeds nothing
    heedful = guess_number_dialogues.SHARE_HEEDFUL
    assert shares == pytest.approx([blind, heedful + (1 - heedful) * blind, 1.0], abs=0.04)


def games_won(game: Game, heeds: bool, number: int) -> float:
    """Played out, one by one: different numbers in any order, or any number that the answers leave."""
    drawn = random.Random(0)
    won = 0
    for _ in range(number):
        left, secret = list(range(game.width)), drawn.randrange(game.width)
        for _ in range(game.turns):
            guess = drawn.choice(left)
            won += guess == secret
            if guess == secret:
                break
            left = [n for n in left if n != guess and (not heeds or (n > guess) == (secret > guess))]
    return won / number


@pytest.mark.parametrize("game", [Game(), Game(width=15, turns=4), Game(width=4, turns=2)])
def test_the_chances_are_those_of_games_played_out(game: Game) -> None:
    assert float(blind_chance(game)) == pytest.approx(games_won(game, False, 20_000), abs=0.012)
    assert float(heedful_chance(game)) == pytest.approx(games_won(game, True, 20_000), abs=0.012)


def test_chances_by_hand() -> None:
    assert heedful_chance(Game(width=3, turns=2)) == Fraction(7, 9)  # 1/3 in one guess; 2 and 2 of 3 of the others
    assert heedful_chance(Game(width=3, turns=3)) == 1
    assert blind_chance(Game(width=3, turns=5)) == 1


def test_a_noisy_calculator_answers_every_call_with_any_number() -> None:
    told: list[str] = []
    for key in (1, 1, 2):
        game = NoisyCalculator()
        game.reset(EnvironmentPrompt("p", "What is 6*7?", "42"), key)
        call = ToolCall("calculator", {"expression": "6*7"})
        answer = game.step(AssistantTurn("", (call, call)))
        assert len(answer.messages) == 2
        again = game.step(AssistantTurn("", (call,)))
        told += [*map(str, answer.messages), *map(str, again.messages)]
        assert game.step(AssistantTurn("It is 42")).reward == 1.0
    assert told[:3] == told[3:6]
    assert len(set(told[3:])) == 6
    assert all(re.fullmatch(r"\d{4}", one) for one in told)
    assert NoisyCalculator.tools == Calculator.tools


def test_noisy_hints_are_a_coin_whatever_is_guessed() -> None:
    heard = {"20": Counter[str](), "29": Counter[str]()}
    for key in range(300):
        for guess, counted in heard.items():
            game = NoisyHints()
            game.reset(EnvironmentPrompt("p", "", "24"), key)
            first, second = (str(game.step(AssistantTurn(guess)).messages[0]) for _ in range(2))
            counted.update([first, second])
            assert game.step(AssistantTurn("24")).reward == 1.0
    for counted in heard.values():
        assert counted["higher"] / counted.total() == pytest.approx(0.5, abs=0.06)
    game = GuessNumber()
    game.reset(EnvironmentPrompt("p", "", "24"), 0)
    assert game.step(AssistantTurn("20")).messages == ["higher"]
