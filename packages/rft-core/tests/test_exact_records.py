"""Records between processes: floats keep their bits, the rest is JSON."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass

import pytest

from rft_core.exact_records import exact_bytes, exact_value, split_exact


def bits(number: float) -> bytes:
    return struct.pack("=d", number)


def with_bits(pattern: int) -> float:
    (number,) = struct.unpack("=d", struct.pack("=Q", pattern))
    return number


FLOATS = [
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    with_bits(0xFFF8000000000000),
    with_bits(0x7FF80000DEADBEEF),
]


def test_floats_arrive_with_their_bits() -> None:
    got = exact_value(exact_bytes({"a": FLOATS, "b": {"c": (1, FLOATS[0], None, True, "0.0")}}))
    assert list(map(bits, got["a"])) == list(map(bits, FLOATS))
    assert got["b"] == {"c": [1, 0.1, None, True, "0.0"]}
    assert type(got["b"]["c"][0]) is int


def test_no_float_is_written_as_text() -> None:
    assert b"0.1234567" not in exact_bytes([0.1234567])
    assert b"NaN" not in exact_bytes([math.nan])


def test_a_record_without_floats_is_what_json_makes_of_it() -> None:
    value = {3: ["ä\ud800", 2**70, {}], "x": None}
    assert exact_value(exact_bytes(value)) == json.loads(json.dumps(value))


@dataclass
class Pair:
    left: float
    right: tuple[float, ...]


def test_a_dataclass_is_an_object_of_its_fields() -> None:
    assert exact_value(exact_bytes([Pair(1.5, (2.5,))])) == [{"left": 1.5, "right": [2.5]}]


def test_what_stands_behind_a_record_is_left() -> None:
    value, rest = split_exact(exact_bytes([0.5]) + b"columns")
    assert (value, bytes(rest)) == ([0.5], b"columns")


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(TypeError, match="key"):
        exact_bytes({0.5: 1})
    with pytest.raises(TypeError):
        exact_bytes({"a": object()})
