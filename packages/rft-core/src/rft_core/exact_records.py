"""Records between processes of one run: JSON but for its floats, which are sent as their 64 bits.

```
8 bytes        n bytes                               8 bytes a float
n, unsigned    JSON, with 0.0 for every float        the floats, in the order of the JSON
```

A float arrives with the bits that it had: NaN with its sign and payload, infinities and -0.0 among them. Numbers are as
the machine stores them. What is read by people or kept for another day is no such record.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rft_core.json_records import fields_of

_LENGTH = struct.Struct("=Q")
_FLOAT = struct.Struct("=d")
_PLAIN = (str, int, type(None))


def exact_bytes(value: Any) -> bytes:
    """Encode a value that is JSON, or in which dataclasses stand, each as an object of its fields.

    Raises:
        TypeError: something in it is neither JSON nor a dataclass, or a float is the key of an object.
    """
    floats = array("d")
    text = json.dumps(_without_floats(value, floats)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, floats.tobytes()])


def exact_value(data: bytes) -> Any:
    """Return what `exact_bytes` encoded, as JSON has it: tuples are lists, keys are text.

    Example: `exact_value(exact_bytes({"reward": math.inf, "steps": (1, 0.5)}))` is
    `{"reward": math.inf, "steps": [1, 0.5]}`.
    """
    return split_exact(data)[0]


def exact_line(value: Any) -> bytes:
    """Encode what `exact_bytes` takes as one line, without its end.

    Raises:
        TypeError: as `exact_bytes`.
    """
    floats = array("d")
    text = json.dumps(_without_floats(value, floats)).encode()
    # JSON of `json.dumps` holds no tab: one in a text is escaped
    return text + b"\t" + base64.b64encode(_little_endian(floats).tobytes()) if floats else text


def value_of_line(line: bytes | bytearray) -> Any:
    """Return what `exact_line` encoded, as `exact_value` does.

    Raises:
        ValueError: the line is no JSON, its floats are no base64, or it has another number of them than its JSON.
    """
    text, _, encoded = line.partition(b"\t")
    data = base64.b64decode(encoded, validate=True)
    if len(data) % _FLOAT.size:
        raise ValueError(f"{len(data)} bytes are no whole number of floats of {_FLOAT.size} bytes")
    floats = _little_endian(array("d", data))
    count = 0

    def next_number(_: str) -> float:
        nonlocal count
        count += 1
        if count > len(floats):
            raise ValueError(f"the JSON has more floats than the {len(floats)} behind it")
        return floats[count - 1]

    value = json.loads(text, parse_float=next_number, parse_constant=_refuse_constant)
    if count != len(floats):
        raise ValueError(f"the JSON has {count} floats, and {len(floats)} stand behind it")
    return value


def split_exact(data: bytes) -> tuple[Any, memoryview]:
    """Return the value at the beginning of `data`, and the bytes behind it."""
    (size,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + size
    text = data[_LENGTH.size : start]
    count = 0

    def next_number(_: str) -> float:
        nonlocal count
        count += 1
        (number,) = struct.unpack_from("=d", data, start + 8 * (count - 1))
        return number

    # the decoder asks for the floats in the order in which they stand in the text
    value = json.loads(text, parse_float=next_number)
    return value, memoryview(data)[start + 8 * count :]


def _little_endian(numbers: array[float]) -> array[float]:
    """Return numbers of this machine in little-endian order, or the reverse."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} stands in the JSON; every float stands behind it")


def _without_floats(value: Any, floats: array[float]) -> Any:
    """Return the value with 0.0 for every float, which is added to `floats`."""
    if isinstance(value, float):
        floats.append(value)
        return 0.0
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        fields = cast(Mapping[Any, Any], value)
        if any(isinstance(key, float) for key in fields):
            raise TypeError("a float is the key of an object, and keys are sent as text")
        return {key: _without_floats(one, floats) for key, one in fields.items()}
    if isinstance(value, list | tuple):
        numbers = cast(Sequence[Any], value)
        # of rows of many numbers, a call for each would take most of the time
        if numbers and set(map(type, numbers)) == {float}:
            floats.extend(numbers)
            return [0.0] * len(numbers)
        if numbers and set(map(type, numbers)) == {int}:
            return numbers
        return [_without_floats(one, floats) for one in cast(Sequence[Any], value)]
    return _without_floats(fields_of(value), floats)
