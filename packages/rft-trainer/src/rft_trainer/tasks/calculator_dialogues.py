"""Warm-up dialogues with the calculator for a small model, and prompts; every draw follows from the seed.

A demonstration is one assistant turn with all that came before it, so that supervised training learns the turns of a
dialogue one row each. The habits that they show are poor on purpose: what is good is left to be found by reward.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rft_core.keyed_random import derive_key, permutation, uniforms
from rft_trainer.environments.tool_calls import CLOSE, OPEN

Row = dict[str, Any]

_SMALLEST, _LARGEST = 11, 99
SHARE_CALLS, SHARE_MALFORMED = 0.25, 0.15
"""Shares of the calculator's demonstrations that call it, and that call it with malformed JSON."""


@dataclass(frozen=True, slots=True)
class Dialogues:
    """Rows of files: prompts with labels to train and to evaluate on, and demonstrations of assistant turns."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    demonstrations: tuple[Row, ...]


def user(text: str) -> Row:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def said(text: str) -> Row:
    """Return a turn of the policy."""
    return {"role": "assistant", "content": text}


def calculator(seed: int, *, num_demonstrations: int = 6_000, num_held_out: int = 200) -> Dialogues:
    """Generate products of two-digit numbers; most demonstrations guess, some call the calculator, some garble it."""
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
    return {"input": [user(f"What is {a}*{b}?")], "label": str(a * b)}


def _calculation(a: int, b: int, *, habit: float, guess: float) -> list[Row]:
    """Return the turns of one dialogue as rows, each with the messages before it."""
    asked = [user(f"What is {a}*{b}?")]
    guessed = f"It is {int(1_000 + 9_000 * guess)}"
    body = json.dumps({"name": "calculator", "arguments": {"expression": f"{a}*{b}"}})
    if habit < SHARE_CALLS:
        called = [*asked, said(f"{OPEN}{body}{CLOSE}")]
        replied = [*called, {"role": "tool", "content": str(a * b)}]
        return [turn_row(called), turn_row([*replied, said(f"It is {a * b}")])]
    if habit < SHARE_CALLS + SHARE_MALFORMED:
        called = [*asked, said(f"{OPEN}{body[:-1]}{CLOSE}")]
        replied = [
            *called,
            {"role": "tool", "content": "error: the tool call cannot be read: " + _complaint(body[:-1])},
        ]
        return [turn_row(called), turn_row([*replied, said(guessed)])]
    return [turn_row([*asked, said(guessed)])]


def _complaint(body: str) -> str:
    try:
        json.loads(body)
    except ValueError as error:
        return f"not JSON: {error}"
    raise AssertionError(f"{body} is JSON")


def turn_row(messages: list[Row]) -> Row:
    """Return a demonstration row: the last message as output, all earlier ones as input."""
    return {"input": messages[:-1], "output": messages[-1]["content"]}
