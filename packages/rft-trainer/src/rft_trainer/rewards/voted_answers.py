"""Answers as votes: which responses to a prompt say the same, for the majority of several (maj@k)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

from rft_trainer.rewards import answers
from rft_trainer.rewards.rules.choice import chosen_letter

AnswerReader = Callable[[str], str | None]
"""Text of a response -> its answer, equal for equal answers; None where it has none."""


def whole_text(response: str) -> str | None:
    """Return the response without surrounding white space, as `exact` compares it; None where nothing is left."""
    return response.strip() or None


def marked_answer(response: str) -> str | None:
    """Return the last marked answer, a number by its value and other answers by their letters; None without a mark."""
    return _last_marked(response, answers.parse_number)


def marked_quantity(response: str) -> str | None:
    """`marked_answer` with units after a number left out, as `gsm8k` compares them."""
    return _last_marked(response, answers.parse_quantity)


def any_answer(response: str) -> str | None:
    """Return the last marked answer, or the whole response where nothing is marked."""
    return marked_answer(response) or whole_text(response)


def chosen_option(response: str) -> str | None:
    """Return the letter that `choice` reads without the row's options, or what is marked where that is no letter."""
    return chosen_letter(response, ()) or marked_answer(response)


_READERS: Mapping[str, AnswerReader] = {
    "exact": whole_text,
    "math": marked_answer,
    "gsm8k": marked_quantity,
    "choice": chosen_option,
}


def answer_reader(*rewards: str) -> AnswerReader:
    """Return how the first of these rewards that compares answers reads them; `any_answer` where none does."""
    return next((_READERS[name] for name in rewards if name in _READERS), any_answer)


def _last_marked(response: str, read: Callable[[str], Fraction | None]) -> str | None:
    marked = answers.marked_answers(response)
    if not marked:
        return None
    number = read(marked[-1])
    return answers.without_spaces(marked[-1]) or None if number is None else str(number)
