"""Values that a reward function returned, as plain data: a number, its parts and steps, or why there is no number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rft_trainer.records.scores import FailureKind

Value = float | dict[str, object]
"""A number; {"reward", "parts", "steps"}; or {"failure", "detail"}, with a traceback where something was raised."""


class WrongLength(ValueError):
    """Error of a list with another number of values than there are responses."""

    kind = FailureKind.WRONG_LENGTH


class WrongType(TypeError):
    """Error of a return value that is no list of numbers."""

    kind = FailureKind.NOT_A_NUMBER


def as_values(returned: object, num_responses: int, function: str) -> list[Value]:
    """Convert what was returned for all responses to one value each.

    Raises:
        WrongType: it is no list.
        WrongLength: a list of another length.
    """
    to_list = getattr(returned, "tolist", None)  # numpy and torch
    listed = to_list() if callable(to_list) else returned
    if not isinstance(listed, list | tuple):
        raise WrongType(f"{function} returned {_shown(listed)}, expected a list of {num_responses} numbers")
    # never paired up as far as it goes: a missing value would shift the rewards of the others
    if len(listed) != num_responses:
        raise WrongLength(f"{function} returned {len(listed)} values for {num_responses} responses")
    return [as_value(value, function) for value in listed]


def as_value(value: Any, function: str) -> Value:
    """Convert the value of one response; `function` names what returned it."""
    if not isinstance(value, dict):
        return _as_number(value, function)
    return _with_parts(_of_verl(value) if "score" in value and "reward" not in value else value, function)


def failure(kind: FailureKind, detail: str, **more: str) -> dict[str, object]:
    """Return the value of a response that has no number."""
    return {"failure": str(kind), "detail": detail, **more}


def _of_verl(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with a score and further figures as reward and parts; what is no number is left out."""
    parts = {name: part for name, part in value.items() if name != "score" and isinstance(part, int | float)}
    return {"reward": value["score"], "parts": parts}


def _with_parts(value: Mapping[str, Any], function: str) -> Value:
    unknown = sorted(map(str, set(value) - {"reward", "parts", "steps"}))
    if unknown or "reward" not in value:
        what = f"{function} returned a mapping with {sorted(map(str, value))}; its keys may be reward, parts, steps"
        return failure(FailureKind.NOT_A_NUMBER, what)
    reward = _as_number(value["reward"], function)
    parts = {str(name): _as_number(part, function) for name, part in value.get("parts", {}).items()}
    steps = [(_as_number(end, function), _as_number(step, function)) for end, step in value.get("steps", [])]
    numbers = [reward, *parts.values(), *(number for step in steps for number in step)]
    # one bad number spoils the score: a sum without it would be another reward
    wrong = next((number for number in numbers if isinstance(number, dict)), None)
    return wrong if wrong is not None else {"reward": reward, "parts": parts, "steps": steps}


def _as_number(value: object, function: str) -> Value:
    item = getattr(value, "item", None)  # a number of numpy or torch
    number = item() if callable(item) else value
    if isinstance(number, int | float) and math.isfinite(number):
        return float(number)
    kind = FailureKind.NONE if number is None else FailureKind.NOT_A_NUMBER
    if isinstance(number, float):
        kind = FailureKind.NOT_FINITE
    return failure(kind, f"{function} returned {str(value)[:100]!r}")


def _shown(value: object) -> str:
    """Return the type of a value, with a short number or text itself."""
    text = repr(value) if isinstance(value, str | int | float) else ""
    return f"{type(value).__name__} {text}".strip() if len(text) <= 60 else type(value).__name__
