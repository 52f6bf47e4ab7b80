"""Records between processes: floats keep their bits, the rest is JSON."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass

import pytest

from rft_core.exact_records import exact_bytes, exact_line, exact_value, split_exact, value_of_line


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


def test_floats_of_a_line_arrive_with_their_bits() -> None:
    value = {"a": FLOATS, "b": [1, FLOATS[0], None, "0.0 \t\n"], "c": []}
    line = exact_line(value)
    assert b"\n" not in line
    got = value_of_line(bytearray(line))
    assert list(map(bits, got["a"])) == list(map(bits, FLOATS))
    assert {name: got[name] for name in "bc"} == {name: value[name] for name in "bc"}


def test_a_line_without_floats_is_json() -> None:
    assert exact_line({"x": [1, True]}) == b'{"x": [1, true]}'
    assert value_of_line(b'{"x": [1, true]}') == {"x": [1, True]}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[0.0]", "more floats than the 0"),
        (b"[Infinity]", "Infinity stands in the JSON"),
        (b"[0.0]\tAAAA", "3 bytes are no whole number"),
        (b"[1]\t" + 10 * b"A" + b"A=", "0 floats, and 1 stand"),
        (b"[0.0]\t\xff", "base64"),
    ],
)
def test_a_line_with_other_floats_than_its_json_is_refused(line: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        value_of_line(line)


def test_no_float_is_written_as_text() -> None:
    assert b"0.1234567" not in exact_line([0.1234567, 1])
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
