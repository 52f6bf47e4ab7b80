"""Comparison of values that came out of the cage, in the form of `cage_main.encode`, with expected ones.

A claimed value is never made an object with behaviour of its own, and is never hashed: numbers that collide cost a
dictionary the square of their count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rft_trainer.sandbox.cage_main import MAX_DEPTH

Encoded = Sequence[Any]
Number = int | float | complex


@dataclass(frozen=True, slots=True)
class Closeness:
    """Numbers count as equal, where one is a float, with |a - b| <= max(relative x max(|a|, |b|), absolute)."""

    relative: float = 1e-9
    absolute: float = 1e-12


class MalformedValueError(ValueError):
    """Raised for what is no encoded value."""


def equal(claimed: Encoded, expected: Encoded, *, closeness: Closeness, sequences_alike: bool) -> bool:
    """Compare as `==` of Python does: numbers by value whatever their type, sets and mappings without order.

    Args:
        claimed: of the cage.
        expected: of the row.
        closeness: of floats outside of sets and keys.
        sequences_alike: a tuple equals a list of the same entries, for rows of JSON, which has no tuples.

    Raises:
        MalformedValueError: `claimed` is no encoded value.
    """
    return _Comparison(closeness, sequences_alike).equal(claimed, expected, 0)


def truth(claimed: Encoded) -> bool:
    """Return what `bool` gives for the value; raises as `equal` does."""
    kind, payload = _parts(claimed)
    if kind == "none":
        return False
    return bool(_number(kind, payload) if kind in _NUMBERS else payload)


@dataclass(frozen=True, slots=True)
class _Comparison:
    closeness: Closeness
    sequences_alike: bool

    def equal(self, claimed: Encoded, expected: Encoded, depth: int) -> bool:
        if depth > MAX_DEPTH:
            raise MalformedValueError("nested too deep")
        (kind, a), (expected_kind, b) = _parts(claimed), _parts(expected)
        if kind in _NUMBERS and expected_kind in _NUMBERS:
            return self._close(_number(kind, a), _number(expected_kind, b))
        if self._sequence(kind) != self._sequence(expected_kind):
            return False
        if kind in ("list", "tuple"):
            return len(a) == len(b) and all(self.equal(x, y, depth + 1) for x, y in zip(a, b, strict=True))
        if kind == "set":
            return _texts(a) == _texts(b)
        if kind == "dict":
            return self._equal_dicts(_pairs(a), _pairs(b), depth)
        return bool(a == b)

    def _equal_dicts(self, a: dict[str, Encoded], b: dict[str, Encoded], depth: int) -> bool:
        return a.keys() == b.keys() and all(self.equal(value, b[key], depth + 1) for key, value in a.items())

    def _sequence(self, kind: str) -> str:
        return "list" if self.sequences_alike and kind == "tuple" else kind

    def _close(self, a: Number, b: Number) -> bool:
        if a == b:
            return True
        if isinstance(a, int) and isinstance(b, int):
            return False
        if isinstance(a, complex) or isinstance(b, complex):
            return False
        try:
            return math.isclose(a, b, rel_tol=self.closeness.relative, abs_tol=self.closeness.absolute)
        except OverflowError:  # an integer beyond every float
            return False


_NUMBERS = ("bool", "int", "float", "complex")
_LISTS = ("list", "tuple", "set", "dict")
_KINDS = ("none", "str", "bytes", *_NUMBERS, *_LISTS)


def _parts(encoded: Encoded) -> tuple[str, Any]:
    """Return kind and payload of an encoded value, the payload of the type that belongs to the kind."""
    if not isinstance(encoded, list) or not encoded or encoded[0] not in _KINDS:
        raise MalformedValueError("no encoded value")
    kind, payload = encoded[0], encoded[1] if len(encoded) == 2 else None
    right = list if kind in (*_LISTS, "complex") else bool if kind == "bool" else str
    if kind != "none" and not isinstance(payload, right):
        raise MalformedValueError(f"no {kind}")
    return kind, payload


def _number(kind: str, payload: Any) -> Number:
    try:
        if kind == "int":
            return int(payload, 16)
        if kind == "complex":
            return complex(*map(float.fromhex, payload))
        return bool(payload) if kind == "bool" else float.fromhex(payload)
    except (ValueError, OverflowError, TypeError) as error:
        raise MalformedValueError(f"no {kind}") from error


def _texts(entries: Sequence[Encoded], depth: int = 0) -> list[str]:
    """Return the entries of a set as texts that are equal where they are, in order and each once."""
    return sorted({_text(each, depth + 1) for each in entries})


def _pairs(entries: Sequence[Encoded], depth: int = 0) -> dict[str, Encoded]:
    found: dict[str, Encoded] = {}
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2:
            raise MalformedValueError("no dict")
        found[_text(entry[0], depth + 1)] = entry[1]
    return found


def _text(encoded: Encoded, depth: int) -> str:
    """Return a text that two values have in common exactly where they are equal."""
    if depth > MAX_DEPTH:
        raise MalformedValueError("nested too deep")
    kind, payload = _parts(encoded)
    if kind in _NUMBERS:
        number = _number(kind, payload)
        if isinstance(number, complex) and number.imag == 0:
            number = number.real
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        # decimal digits of an integer are limited, hexadecimal ones are not
        return hex(number) if isinstance(number, int) else repr(number)
    if kind in ("list", "tuple"):
        return f"{kind}[" + ",".join(_text(each, depth + 1) for each in payload) + "]"
    if kind == "set":
        return "set[" + ",".join(_texts(payload, depth)) + "]"
    if kind == "dict":
        return "dict[" + ",".join(f"{k}:{_text(v, depth + 1)}" for k, v in sorted(_pairs(payload, depth).items())) + "]"
    return f"{kind}{payload!r}"
