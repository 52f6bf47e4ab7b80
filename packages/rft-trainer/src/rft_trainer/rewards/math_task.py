"""Algebraic equality of two mathematical answers; runs in a scoring process only.

Only LaTeX is read, by a grammar; the part of math-verify that hands plain expressions to sympy's
parser, which evaluates them as Python, is not used. Its time limits are signals and stay off:
the pool kills this process instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, MatrixBase

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

_UNREADABLE = "unreadable"


def load(path: str, name: str) -> Callable[[Mapping[str, object]], object]:
    """Return the handler of requests; the task has no file, so that both arguments are empty."""
    assert not path
    assert not name
    return handle


def handle(payload: Mapping[str, object]) -> object:
    """Compare {"gold": str, "prediction": str}: True, False, or "unreadable" for an unreadable gold answer."""
    gold, prediction = payload["gold"], payload["prediction"]
    assert isinstance(gold, str)
    assert isinstance(prediction, str)
    return compare(gold, prediction)


def compare(gold: str, prediction: str) -> bool | str:
    """Compare two answers given as LaTeX without dollar signs; the order matters to math-verify."""
    parsed_gold = _parse(gold)
    if not parsed_gold:
        return _UNREADABLE
    parsed_prediction = _parse(prediction)
    return bool(parsed_prediction) and verify(parsed_gold, parsed_prediction, timeout_seconds=None)


def _parse(answer: str) -> list[Basic | MatrixBase | str]:
    return parse(
        "\\boxed{" + answer + "}",
        [LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=0,
    )
