"""Dialogues to warm a small model up on, and the prompts of its conversations; every draw follows from the seed.

A demonstration is one assistant turn with all that came before it, so that supervised training learns the turns of a
dialogue one row each. The habits that they show are poor on purpose: what is good is left to be found by reward.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rft_algos.keyed_random import derive_key, permutation, uniforms
from rft_trainer.environments.guess_number import HIGHEST, LOWEST
from rft_trainer.environments.tool_calls import CLOSE, OPEN

Row = dict[str, Any]

_SMALLEST, _LARGEST = 11, 99
SHARE_CALLS, SHARE_MALFORMED = 0.25, 0.15
"""Of the calculator's demonstrations: those that call it, and those that try and get the JSON wrong."""

SHARE_HEEDED = 0.35
"""Of the guessing game's demonstrations: those that heed the hints; the others misread them."""


@dataclass(frozen=True, slots=True)
class Dialogues:
    """Rows of files: prompts with labels to train and to evaluate on, and demonstrations of assistant turns."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    demonstrations: tuple[Row, ...]


def _user(text: str) -> Row:
    return {"role": "user", "content": text}


def _said(text: str) -> Row:
    return {"role": "assistant", "content": text}


def calculator(seed: int, *, num_demonstrations: int = 6_000, num_held_out: int = 200) -> Dialogues:
    """Products of two-digit numbers: most demonstrations guess, some call the calculator, some garble the call."""
    numbers = range(_SMALLEST, _LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    order = permutation(derive_key(seed, "calculator-pairs"), len(pairs)).tolist()
    held_out, train = order[:num_held_out], order[num_held_out:]
    draws = uniforms([derive_key(seed, "calculator-habits")], 2 * num_demonstrations)[0].tolist()
    demonstrations: list[Row] = []
    for number in range(num_demonstrations):
        pair = pairs[train[number % len(train)]]
        demonstrations += _calculation(*pair, habit=draws[2 * number], guess=draws[2 * number + 1])
    return Dialogues(
        tuple(_product(*pairs[i]) for i in train), tuple(_product(*pairs[i]) for i in held_out), tuple(demonstrations)
    )


def _product(a: int, b: int) -> Row:
    return {"input": [_user(f"What is {a}*{b}?")], "label": str(a * b)}


def _calculation(a: int, b: int, *, habit: float, guess: float) -> list[Row]:
    """The turns of one dialogue, each with what came before it."""
    asked = [_user(f"What is {a}*{b}?")]
    guessed = f"It is {int(1_000 + 9_000 * guess)}"
    body = json.dumps({"name": "calculator", "arguments": {"expression": f"{a}*{b}"}})
    if habit < SHARE_CALLS:
        called = [*asked, _said(f"{OPEN}{body}{CLOSE}")]
        told = [*called, {"role": "tool", "content": str(a * b)}]
        return [_row(called), _row([*told, _said(f"It is {a * b}")])]
    if habit < SHARE_CALLS + SHARE_MALFORMED:
        called = [*asked, _said(f"{OPEN}{body[:-1]}{CLOSE}")]
        told = [*called, {"role": "tool", "content": "error: the tool call cannot be read: " + _complaint(body[:-1])}]
        return [_row(called), _row([*told, _said(guessed)])]
    return [_row([*asked, _said(guessed)])]


def _complaint(body: str) -> str:
    try:
        json.loads(body)
    except ValueError as error:
        return f"not JSON: {error}"
    raise AssertionError(f"{body} is JSON")


def _row(messages: list[Row]) -> Row:
    return {"input": messages[:-1], "output": messages[-1]["content"]}


def _guesses(asked: Row, secret: int, draws: list[float], *, heeds: bool) -> list[Row]:
    """The turns of one dialogue, each with what came before it."""
    messages, rows = [asked], list[Row]()
    low, high = LOWEST, HIGHEST
    for draw in draws:
        guess = low + int((high - low + 1) * draw)
        messages = [*messages, _said(str(guess))]
        rows.append(_row(messages))
        if guess == secret:
            break
        messages = [*messages, _user("higher" if guess < secret else "lower")]
        low, high = (guess + 1, high) if heeds == (guess < secret) else (low, guess - 1)
        if low > high:  # a misread hint has left nothing
            low, high = LOWEST, HIGHEST
    return rows


def guess_number(seed: int, *, num_prompts: int = 3_000, num_demonstrations: int = 6_000, turns: int = 2) -> Dialogues:
    """A number to be guessed: most demonstrations take higher for lower, some heed the hints."""
    asked = _user(f"Guess my number from {LOWEST} to {HIGHEST}.")
    count = HIGHEST - LOWEST + 1
    secrets = [LOWEST + i % count for i in permutation(derive_key(seed, "guess-secrets"), num_prompts).tolist()]
    draws = uniforms([derive_key(seed, "guess-habits")], num_demonstrations * (turns + 2))[0].view(
        num_demonstrations, -1
    )
    demonstrations: list[Row] = []
    for habit, secret, *guesses in draws.tolist():
        demonstrations += _guesses(asked, LOWEST + int(count * secret), guesses, heeds=habit < SHARE_HEEDED)
    return Dialogues(
        tuple({"input": [asked], "label": str(secret)} for secret in secrets),
        tuple({"input": [asked], "label": str(secret)} for secret in range(LOWEST, HIGHEST + 1)),
        tuple(demonstrations),
    )
