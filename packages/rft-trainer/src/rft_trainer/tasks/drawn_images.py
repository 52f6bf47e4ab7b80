"""Drawn images with questions whose answers are known: shapes to count, a colour, two bars, a two-digit number.

Everything is drawn by (seed, split, index) alone, so the same seed writes the same bytes. Images are RGB files (PNG)
of `SIZE` x `SIZE` pixels; the four kinds of questions take turns. What stands where moves about by a few pixels, so
that no two images are likely to be equal.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rft_core.keyed_random import derive_key, uniforms

SIZE = 48
KINDS = ("count", "colour", "bars", "number")
QUESTIONS = {
    "count": "how many squares?",
    "colour": "which colour?",
    "bars": "which bar is longer?",
    "number": "which number?",
}
COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 80, 200),
    "yellow": (240, 200, 20),
    "pink": (240, 120, 200),
    "black": (20, 20, 20),
}
MOST_SQUARES = 6
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789? \n:"
"""Characters of questions, answers and roles."""

_PAPER = (250, 250, 245)
_DRAWS = 40
_FONT = (
    ("01110", "10001", "10011", "10101", "11001", "10001", "01110"),
    ("00100", "01100", "00100", "00100", "00100", "00100", "01110"),
    ("01110", "10001", "00001", "00110", "01000", "10000", "11111"),
    ("11110", "00001", "00001", "01110", "00001", "00001", "11110"),
    ("00010", "00110", "01010", "10010", "11111", "00010", "00010"),
    ("11111", "10000", "11110", "00001", "00001", "10001", "01110"),
    ("00110", "01000", "10000", "11110", "10001", "10001", "01110"),
    ("11111", "00001", "00010", "00100", "01000", "01000", "01000"),
    ("01110", "10001", "10001", "01110", "10001", "10001", "01110"),
    ("01110", "10001", "10001", "01111", "00001", "00010", "01100"),
)

Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawn image with its question and answer."""

    kind: str
    question: str
    answer: str
    png: bytes


class _Canvas:
    """Square of `SIZE` x `SIZE` pixels on which rectangles are filled."""

    def __init__(self) -> None:
        self._rows = [bytearray(bytes(_PAPER) * SIZE) for _ in range(SIZE)]

    def fill(self, left: int, top: int, width: int, height: int, colour: Colour) -> None:
        """Fill a rectangle, clipped at the edge."""
        first, last = max(left, 0), min(left + width, SIZE)
        for row in self._rows[max(top, 0) : max(min(top + height, SIZE), 0)]:
            row[3 * first : 3 * last] = bytes(colour) * max(last - first, 0)

    def png(self) -> bytes:
        """Encode the canvas as a PNG file."""
        header = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
        # a byte 0 before each row: no filter
        body = zlib.compress(b"".join(b"\0" + bytes(row) for row in self._rows), 9)
        chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in chunks
        )


class _Draws:
    """Stream of random numbers in [0, 1) under one key."""

    def __init__(self, key: int) -> None:
        self._numbers: Iterator[float] = iter(uniforms([key], _DRAWS)[0].tolist())

    def below(self, bound: int) -> int:
        """Draw an integer from 0 to bound - 1."""
        return int(next(self._numbers) * bound)

    def one_of(self, choices: Sequence[str]) -> str:
        """Draw one of the choices."""
        return choices[self.below(len(choices))]

    def ink(self) -> Colour:
        """Draw a colour of `COLOURS`."""
        return COLOURS[self.one_of(tuple(COLOURS))]


def drawings(seed: int, split: str, count: int) -> list[Drawing]:
    """Generate `count` drawings of a split; another split or seed has other draws."""
    return [_drawing(KINDS[i % len(KINDS)], derive_key(seed, f"drawn-images:{split}", i)) for i in range(count)]


def chance(answers: Sequence[tuple[str, str]]) -> float:
    """Compute the accuracy of the commonest answer to every question, from (question, answer) pairs."""
    counts: dict[str, Counter[str]] = {}
    for question, answer in answers:
        counts.setdefault(question, Counter())[answer] += 1
    return sum(max(counter.values()) for counter in counts.values()) / len(answers)


def _drawing(kind: str, key: int) -> Drawing:
    canvas, draws = _Canvas(), _Draws(key)
    draw = {"count": _count, "colour": _colour, "bars": _bars, "number": _number}[kind]
    return Drawing(kind, QUESTIONS[kind], draw(canvas, draws), canvas.png())


def _count(canvas: _Canvas, draws: _Draws) -> str:
    """Draw squares in distinct cells of a 3 x 3 grid; return their number."""
    number, colour = 1 + draws.below(MOST_SQUARES), draws.ink()
    cells = list(range(9))
    # a cell is taken once, so that no two squares touch
    for _ in range(number):
        row, column = divmod(cells.pop(draws.below(len(cells))), 3)
        canvas.fill(16 * column + 2 + draws.below(4), 16 * row + 2 + draws.below(4), 9, 9, colour)
    return str(number)


def _colour(canvas: _Canvas, draws: _Draws) -> str:
    """Draw one large rectangle; return the name of its colour."""
    name = draws.one_of(tuple(COLOURS))
    width, height = 14 + draws.below(14), 14 + draws.below(14)
    canvas.fill(2 + draws.below(44 - width), 2 + draws.below(44 - height), width, height, COLOURS[name])
    return name


def _bars(canvas: _Canvas, draws: _Draws) -> str:
    """Draw two bars, one above the other, with lengths 8 pixels or more apart; return the longer one."""
    short = 6 + draws.below(20)
    long = short + 8 + draws.below(34 - short)
    answer, colour = draws.one_of(("top", "bottom")), draws.ink()
    lengths = (long, short) if answer == "top" else (short, long)
    for index, length in enumerate(lengths):
        canvas.fill(2 + draws.below(46 - length), 8 + 22 * index + draws.below(5), length, 7, colour)
    return answer


def _number(canvas: _Canvas, draws: _Draws) -> str:
    """Draw two digits of 20 x 28 pixels; return them."""
    digits, colour = (draws.below(10), draws.below(10)), COLOURS[draws.one_of(("black", "blue"))]
    left, top = 2 + draws.below(3), 8 + draws.below(5)
    for index, digit in enumerate(digits):
        for y, line in enumerate(_FONT[digit]):
            for x, dot in enumerate(line):
                if dot == "1":
                    canvas.fill(left + 22 * index + 4 * x, top + 4 * y, 4, 4, colour)
    return f"{digits[0]}{digits[1]}"
