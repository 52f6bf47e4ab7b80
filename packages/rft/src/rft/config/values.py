"""Conversion of written text to the value of a setting, and a description of the allowed values.

Flags and files take the same path: what is written is text, and pydantic converts it by the
setting's annotation and bounds, so that both accept and refuse the same things.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, cast

from rft.config.schema import REQUIRED, Setting

TRUE = ("true", "1", "yes")
FALSE = ("false", "0", "no")
BOOLEAN_FORMS = "true, false, yes, no, 1, 0"

_TO_TEN = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBER_WORDS = {word: number for number, word in enumerate(_TO_TEN, 1)}
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "%": 0.01}
_WRITTEN = re.compile(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\s*([km%]?)", re.IGNORECASE)
"""A number as people write it: with commas, thousands or millions as a letter, or per cent."""
_BOUNDS = {"minimum": "ge", "maximum": "le", "above": "gt", "below": "lt"}


class NotAllowed(ValueError):
    """The text is not a value of this setting."""


def convert(setting: Setting, texts: tuple[str, ...]) -> Any:
    """The value of `texts` for this setting.

    Raises:
        NotAllowed: it is not one; `allowed(setting)` says what would be.
    """
    if setting.may_be_none and len(texts) == 1 and texts[0].lower() in ("none", "null"):
        return None
    if setting.is_pair:
        return _validated(
            setting, [part for text in texts for part in re.split(r"[,\s]+", text.strip("[]() ")) if part]
        )
    if len(texts) != 1:
        raise NotAllowed(f"{len(texts)} values")
    if setting.is_switch:
        return _switch(texts[0])
    return _validated(setting, _digits(texts[0]) if setting.base is int else texts[0])


def _switch(text: str) -> bool:
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise NotAllowed(text)


def _digits(text: str) -> str:
    """Return the digits of a whole number in exponent form, such as `1e6`; other text unchanged."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE]\+?\d{1,2}", text) and float(text).is_integer():
        return str(int(float(text)))
    return text


def _validated(setting: Setting, raw: str | list[str]) -> Any:
    from pydantic import Field, TypeAdapter, ValidationError  # here, so that help and pages do not wait for it

    bounds: dict[str, Any] = {ours: setting.metadata[key] for key, ours in _BOUNDS.items() if key in setting.metadata}
    if setting.base is float or setting.is_pair:
        # neither infinity nor NaN is a setting, also where there is no bound
        bounds["allow_inf_nan"] = False
    if setting.is_pair:
        kind: Any = tuple[Annotated[float, Field(**bounds)], Annotated[float, Field(**bounds)]]
    else:
        kind = Annotated[setting.base, Field(**bounds)] if bounds else setting.base
    try:
        return TypeAdapter(kind).validate_python(raw)
    except ValidationError as error:
        raise NotAllowed(str(raw)) from error


def allowed(setting: Setting) -> str:
    """Return the values that the setting takes as text: `a whole number of at least 1`."""
    if setting.is_switch:
        return f"{BOOLEAN_FORMS}, none" if setting.may_be_none else BOOLEAN_FORMS
    if setting.choices:
        return f"one of {', '.join(setting.choices)}"
    if setting.base is str:
        return "text"
    noun = "a whole number" if setting.base is int else "two numbers" if setting.is_pair else "a number"
    bounds = limits(setting)
    text = f"{noun} {bounds}" if bounds else noun
    return f"{text}, or none" if setting.may_be_none else text


def limits(setting: Setting) -> str:
    """Return the bounds of a number as text: `of at least 1`; empty without any."""
    words = {"minimum": "of at least", "above": "above", "maximum": "at most", "below": "below"}
    return " and ".join(f"{word} {setting.metadata[key]:g}" for key, word in words.items() if key in setting.metadata)


def example(setting: Setting, texts: tuple[str, ...]) -> str:
    """A legal value near what was written: the number that it is in words, the bound that was crossed, or the default.

    A fraction becomes a whole number that is not 0, which turns many settings off.
    """
    number = _number(texts)
    if number is None and (written := _written_number(setting, texts)):
        return written
    if number is not None and not setting.is_pair and setting.base in (int, float):
        low, high = setting.metadata.get("minimum"), setting.metadata.get("maximum")
        if low is not None and number < low:
            return f"{low:g}"
        if high is not None and number > high:
            return f"{high:g}"
        if setting.base is int and low is not None and number >= low:
            nearest = max(round(number), math.ceil(low))
            return str(nearest) if nearest or not number else "1" if number > 0 else as_text(setting.default)
    if setting.default is REQUIRED:
        return "PATH"
    return as_text(setting.default) if not isinstance(setting.default, str) or setting.default else "VALUE"


def _written_number(setting: Setting, texts: tuple[str, ...]) -> str:
    """Return the number that a text writes in words, with commas, as 10k or as 5 %; "" where it is not allowed."""
    if len(texts) != 1 or setting.base not in (int, float) or setting.is_pair:
        return ""
    text = texts[0].strip().lower()
    found = _WRITTEN.fullmatch(text)
    if found is None and text not in _NUMBER_WORDS:
        return ""
    number = float(_NUMBER_WORDS.get(text, 0))
    if found is not None:
        number = float(found[1].replace(",", "")) * _FACTORS[found[2]]
    written = str(int(number)) if number.is_integer() else f"{number:g}"
    try:
        convert(setting, (written,))
    except NotAllowed:
        return ""
    return written


def _number(texts: tuple[str, ...]) -> float | None:
    try:
        number = float(texts[0]) if len(texts) == 1 else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def as_text(value: object) -> str:
    """A value as it would be written on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(as_text(part) for part in cast("tuple[object, ...]", value))
    if isinstance(value, str) and len(value.splitlines()) > 1:
        return repr(value)  # a value of several lines would break up the line of the message that names it
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_python(text: str) -> str:
    """The text of a value as Python writes it."""
    if text.lower() in ("true", "false", "none"):
        return text.capitalize()
    return text if re.fullmatch(r"[+-]?\d[\d.]*(?:e[+-]?\d+)?", text) else repr(text)
