"""Questions with choices as published data sets have them: one prompt with lettered choices, and the right letter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from string import ascii_uppercase
from typing import Any, cast

from rft_trainer.data.readers.rows import Row, shown, wrong_type

QUESTION, LETTER = "question with choices", "letter of the right choice"
"""Columns that are made of others."""


def keyed_choices(row: Row) -> dict[str, Any]:
    """Read a row of GPQA: the right answer and three wrong ones in columns of their own.

    Their order is drawn from question and answers alone, so that it is the same in every evaluation, on any part of the
    rows, and says nothing of which one is right.
    """
    question, right = _text(row, "Question"), _text(row, "Correct Answer")
    wrong = [_text(row, f"Incorrect Answer {number}") for number in (1, 2, 3)]
    choices = sorted((right, *wrong), key=lambda choice: _draw(question, choice))
    return _asked(question, choices, choices.index(right))


def listed_choices(choices: str, right: str) -> Callable[[Row], dict[str, Any]]:
    """Return the reader of rows with a list of choices, the right one as a number from 0 or a letter (MMLU)."""

    def read(row: Row) -> dict[str, Any]:
        texts = _texts(row, choices, row.fields.get(choices))
        answer = row.fields.get(right)
        letters = ascii_uppercase[: len(texts)]
        number = (
            letters.find(answer.strip().upper()) if isinstance(answer, str) and len(answer.strip()) == 1 else answer
        )
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(texts):
            why = f"it is a number from 0 to {len(texts) - 1}, or a letter from A to {letters[-1]}"
            raise wrong_type(row, right, shown(answer), why)
        return _asked(_text(row, "question"), texts, number)

    return read


def lettered_choices(row: Row) -> dict[str, Any]:
    """Read a row of ARC: choices with a text and a label each, and the label of the right one."""
    choices = row.fields.get("choices")
    if not isinstance(choices, Mapping) or not {"text", "label"} <= choices.keys():
        raise wrong_type(row, "choices", shown(choices), "it is an object with text and label, a list each")
    columns = cast("Mapping[str, Any]", choices)
    texts, labels = (_texts(row, f"choices.{name}", columns[name]) for name in ("text", "label"))
    right = row.fields.get("answerKey")
    if len(texts) != len(labels) or right not in labels:
        raise wrong_type(row, "answerKey", shown(right), f"it is one of the labels {', '.join(labels)}")
    return _asked(_text(row, "question"), texts, labels.index(cast("str", right)))


def _asked(question: str, choices: Sequence[str], right: int) -> dict[str, Any]:
    lines = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False)]
    return {QUESTION: "\n".join([question, "", *lines]), LETTER: ascii_uppercase[right]}


def _draw(question: str, choice: str) -> bytes:
    return hashlib.blake2b(f"choices|{len(question)}:{question}|{choice}".encode(), digest_size=8).digest()


def _texts(row: Row, column: str, value: object) -> list[str]:
    items = list(cast("Sequence[object]", value)) if isinstance(value, list | tuple) else []
    if not 2 <= len(items) <= len(ascii_uppercase) or not all(isinstance(item, str | int | float) for item in items):
        raise wrong_type(row, column, shown(value), f"it is a list of 2 to {len(ascii_uppercase)} texts")
    return [str(item).strip() for item in items]


def _text(row: Row, column: str) -> str:
    value = row.fields.get(column)
    if not isinstance(value, str) or not value.strip():
        raise wrong_type(row, column, shown(value), "the field must be text")
    return value.strip()
