"""Damaged and forged files of every format that the program reads, each keyed by a number.

A file begins as a valid one. Bytes of it are then changed, cut or repeated, or its JSON gets a value of another kind, a
key twice, a number that is too large; where a hash or a length would give that away, it is made to fit again.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

WORDS = (
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\t"),
    *(b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"-1", b"0", b"null", b"true", b"\\ud800", b"\\u0000", b"../", b"/"),
    *(b"<script>", b"\x1b[2J", b"!!python/object/apply:os.system [ls]", b"&a [*a]", b'"\\U00110000"', b"%YAML 1.1\n"),
    *(b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x80\x04\x95", b"PK\x03\x04", b"\x1f\x8b\x08"),
)
"""What is put into files, besides random bytes and pieces of their own."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**64), 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "a", "\x00", "\ud800", "../../etc/passwd", "/etc/passwd", "\x1b[2J", "x" * 3000, "1", "none", "F64", "<a_1>"),
    *([], {}, [None], [[]], {"": None}, {"a": {"a": {"a": 1}}}, [1, 2, 3], ["a", "b"], [0, 10**12]),
)
DEEP = 100_000
"""Lists in one another."""


def mutated_bytes(rng: Random, valid: bytes) -> bytes:
    """Change a file in one to four places."""
    content = bytearray(valid)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.choice((1, 1, 2, 4, 8, 64, 1000)))
        kind = rng.randrange(7)
        if kind == 0 and content:
            content[min(at, len(content) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del content[at:end]
        elif kind == 2:
            del content[at:]
        elif kind == 3:
            content[at:at] = rng.choice(WORDS)
        elif kind == 4:
            content[at:end] = rng.choice(WORDS)
        elif kind == 5:
            content[at:at] = content[at:end] * rng.choice((1, 2, 50))
        else:
            content[at:end] = rng.randbytes(end - at)
    return bytes(content)


def with_flipped_bits(rng: Random, valid: bytes) -> bytes:
    """Change one to four bits of a file: what it says of itself stays nearly right."""
    content = bytearray(valid)
    for _ in range(rng.randint(1, 4)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def mutated_json(rng: Random, value: Any) -> bytes:
    """JSON of a value of which one to three parts were replaced, left out or repeated."""
    kind = rng.randrange(12)
    if kind == 0:
        return b"[" * DEEP
    if kind == 1:
        text = json.dumps(value)
        return (text[:-1] + ', "x": ' + "9" * 5000 + "}").encode() if text.endswith("}") else b"9" * 5000
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        value = _changed(rng, value, rng.randint(1, 6))
    text = json.dumps(value)
    if kind == 2 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + ", " + text[1:]  # every key twice
    return text.encode()


def _changed(rng: Random, value: Any, depth: int) -> Any:
    """The value with something else at a place at most so deep."""
    if not depth or not isinstance(value, list | dict) or not value:
        return copy.deepcopy(rng.choice(VALUES))
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    kind = rng.randrange(8)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, dict):
        value[rng.choice(("", "x", "\x00", "__class__", str(key).upper(), f"{key} "))] = copy.deepcopy(value[key])
    elif kind == 2 and isinstance(value, list):
        value.insert(key, copy.deepcopy(value[key]))
    elif kind == 3:
        value[key] = copy.deepcopy(rng.choice(VALUES))
    else:
        value[key] = _changed(rng, value[key], depth - 1)
    return value


@dataclass(frozen=True, slots=True)
class HostileFile:
    """A file of a format, and what reads it with all that lies beside it."""

    place: Path
    """Where the forged content is put, in a folder whose other files are valid."""
    forged: Callable[[Random], bytes]
    read: Callable[[], object]


def raw(valid: bytes) -> Callable[[Random], bytes]:
    """Content of which bytes were changed."""
    return lambda rng: mutated_bytes(rng, valid)


def binary(valid: bytes) -> Callable[[Random], bytes]:
    """Content of which bytes were changed, or more often a few bits."""
    return lambda rng: mutated_bytes(rng, valid) if rng.random() < 0.3 else with_flipped_bits(rng, valid)


def structured(valid: bytes) -> Callable[[Random], bytes]:
    """JSON of which bytes, or more often values, were changed."""
    value = json.loads(valid)
    return lambda rng: mutated_bytes(rng, valid) if rng.random() < 0.3 else mutated_json(rng, value)


def manifest(valid: bytes) -> Callable[[Random], bytes]:
    """A manifest in canonical form with the right hash, which says something else."""
    body = json.loads(valid)["manifest"]

    def forged(rng: Random) -> bytes:
        if rng.random() < 0.1:
            return mutated_bytes(rng, valid)
        text = mutated_json(rng, body)
        try:
            value = json.loads(text)
            content = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        except (ValueError, RecursionError):
            return text
        whole = {"manifest": value, "sha256": hashlib.sha256(content).hexdigest()}
        return json.dumps(whole, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    return forged


def safetensors(valid: bytes) -> Callable[[Random], bytes]:
    """A safetensors file of which bytes were changed, or whose header says something else, its length made to fit."""
    length = struct.unpack("<Q", valid[:8])[0]
    header, data = json.loads(valid[8 : 8 + length]), valid[8 + length :]

    def forged(rng: Random) -> bytes:
        if rng.random() < 0.3:
            return binary(valid)(rng)
        text = mutated_json(rng, header)
        stated = len(text) if rng.random() < 0.9 else rng.choice((0, 1, 2**31, 2**63, len(text) * 2))
        return struct.pack("<Q", stated) + text + data

    return forged


def parquet_bytes(rows: list[dict[str, Any]]) -> bytes:
    """Rows as a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    return stream.getvalue()


def arrow_bytes(rows: list[dict[str, Any]]) -> bytes:
    """Rows as a stream of Arrow."""
    import pyarrow as pa

    table, stream = pa.Table.from_pylist(rows), io.BytesIO()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()
