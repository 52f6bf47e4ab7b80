"""Warm-up dialogues of the guessing game for a small model, and prompts; every draw follows from the seed.

What is demonstrated is poor: most dialogues guess any number of the range, whatever the answers were; some guess any
number that the answers leave; none halves what is left. Ranges that are evaluated are in neither set of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rft_core.keyed_random import derive_key, permutation, uniforms
from rft_trainer.tasks.calculator_dialogues import Dialogues, Row, said, turn_row, user


@dataclass(frozen=True, slots=True)
class Game:
    """A number from a range of `width` numbers with the same tens, so that a guess is one choice: its last digit."""

    width: int = 7
    turns: int = 3
    """Guesses of a game; with n of them, 2^n - 1 numbers can be told apart for certain."""
    lowest: int = 10
    highest: int = 99

    @property
    def starts(self) -> list[int]:
        """Smallest numbers of the ranges: with two digits and 7 numbers 36 of them."""
        return [n for n in range(self.lowest, self.highest + 1) if n % 10 + self.width <= 10]


GAME = Game()
SHARE_HELD_OUT = 0.25
"""Share of the ranges that are held out for evaluation."""

SHARE_HEEDFUL = 0.3
"""Share of the demonstrations whose guesses agree with the answers."""


def question(start: int, game: Game = GAME) -> str:
    """Return the question of a game to the policy."""
    return f"Guess my number from {start} to {start + game.width - 1}."


def guess_number(
    seed: int, *, game: Game = GAME, num_demonstrations: int = 6_000, share_heedful: float = SHARE_HEEDFUL
) -> Dialogues:
    """Generate a row for each number of each range, and demonstrations on the training ranges."""
    starts = [game.starts[i] for i in permutation(derive_key(seed, "guess-ranges"), len(game.starts)).tolist()]
    num_held_out = round(SHARE_HELD_OUT * len(starts))
    held_out, train = sorted(starts[:num_held_out]), starts[num_held_out:]
    # a fixed number of draws for each dialogue, also for those that end early: later ones do not depend on them
    draws = uniforms([derive_key(seed, "guess-habits")], num_demonstrations * (game.turns + 3))[0]
    demonstrations: list[Row] = []
    for habit, where, secret, *guesses in draws.view(num_demonstrations, -1).tolist():
        start = train[int(len(train) * where)]
        asked = user(question(start, game))
        left = range(start, start + game.width)
        demonstrations += _dialogue(asked, left, left[int(game.width * secret)], guesses, heeds=habit < share_heedful)
    rows = [_row(start, offset, game) for start in train for offset in range(game.width)]
    order = permutation(derive_key(seed, "guess-prompts"), len(rows)).tolist()
    return Dialogues(
        tuple(rows[i] for i in order),
        tuple(_row(start, offset, game) for start in held_out for offset in range(game.width)),
        tuple(demonstrations),
    )


def _row(start: int, offset: int, game: Game) -> Row:
    return {"input": [user(question(start, game))], "label": str(start + offset)}


def _dialogue(asked: Row, left: range, secret: int, draws: list[float], *, heeds: bool) -> list[Row]:
    """Return the turns of one dialogue, each with the messages before it; guesses are drawn from `left`."""
    messages, rows = [asked], list[Row]()
    for draw in draws:
        guess = left[int(len(left) * draw)]
        messages = [*messages, said(str(guess))]
        rows.append(turn_row(messages))
        if guess == secret:
            break
        messages = [*messages, user("higher" if guess < secret else "lower")]
        if heeds:
            left = range(guess + 1, left.stop) if guess < secret else range(left.start, guess)
    return rows


def blind_chance(game: Game = GAME) -> Fraction:
    """Compute the share of games won by distinct guesses in any order that ignore the answers."""
    return Fraction(min(game.turns, game.width), game.width)


def heedful_chance(game: Game = GAME) -> Fraction:
    """Compute the share of games won by guesses that are uniform over the numbers left by the answers.

    With n numbers left and k guesses, the expected number of secrets that are won is
    f(n, k) = 1 + 2/n * sum of f(m, k - 1) over m < n, and f(n, 1) = 1.
    """
    won = [Fraction(0)] * (game.width + 1)
    for _ in range(game.turns):
        won = [Fraction(0), *(1 + 2 * sum(won[:n], Fraction(0)) / n for n in range(1, game.width + 1))]
    return won[game.width] / game.width
