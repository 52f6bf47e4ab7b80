"""What a drawing shows is what its answer says, found again from the pixels of the file."""

from __future__ import annotations

import struct
import zlib

import pytest

from rft_trainer.tasks.drawn_images import _FONT, COLOURS, SIZE, Drawing, chance, drawings

Pixels = list[list[tuple[int, int, int]]]


def pixels_of(drawing: Drawing) -> Pixels:
    """The rows of the file, decoded by hand: RGB, no filter."""
    data, place, body = drawing.png, 8, b""
    while place < len(data):
        (length,), name = struct.unpack(">I", data[place : place + 4]), data[place + 4 : place + 8]
        chunk = data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0] == zlib.crc32(name + chunk)
        if name == b"IHDR":
            assert struct.unpack(">IIBBBBB", chunk) == (SIZE, SIZE, 8, 2, 0, 0, 0)
        body += chunk * (name == b"IDAT")
        place += 12 + length
    raw, stride = zlib.decompress(body), 1 + 3 * SIZE
    assert len(raw) == SIZE * stride
    lines = [raw[row * stride + 1 : (row + 1) * stride] for row in range(SIZE)]
    return [[(line[3 * x], line[3 * x + 1], line[3 * x + 2]) for x in range(SIZE)] for line in lines]


def inked(pixels: Pixels) -> set[tuple[int, int]]:
    """(row, column) of every pixel that is not paper."""
    return {(y, x) for y, row in enumerate(pixels) for x, pixel in enumerate(row) if pixel in COLOURS.values()}


def pieces(found: set[tuple[int, int]]) -> int:
    """Connected patches."""
    left, number = set(found), 0
    while left:
        number += 1
        border = [left.pop()]
        while border:
            y, x = border.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            border += near
    return number


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Drawing]]:
    found: dict[str, list[Drawing]] = {}
    for drawing in drawings(5, "train", 240):
        found.setdefault(drawing.kind, []).append(drawing)
    return found


def test_squares_are_as_many_as_the_answer(drawn: dict[str, list[Drawing]]) -> None:
    assert [str(pieces(inked(pixels_of(one)))) for one in drawn["count"]] == [one.answer for one in drawn["count"]]
    assert {one.answer for one in drawn["count"]} == set("123456")


def test_the_colour_is_the_only_one(drawn: dict[str, list[Drawing]]) -> None:
    names = {colour: name for name, colour in COLOURS.items()}
    for one in drawn["colour"]:
        shown = {pixel for row in pixels_of(one) for pixel in row if pixel in names}
        assert [names[pixel] for pixel in shown] == [one.answer]


def test_the_longer_bar_is_where_the_answer_says(drawn: dict[str, list[Drawing]]) -> None:
    for one in drawn["bars"]:
        found = inked(pixels_of(one))
        top = max(sum((y, x) in found for x in range(SIZE)) for y in range(SIZE // 2))
        bottom = max(sum((y, x) in found for x in range(SIZE)) for y in range(SIZE // 2, SIZE))
        assert abs(top - bottom) >= 8
        assert one.answer == ("top" if top > bottom else "bottom")


def test_the_digits_are_those_of_the_answer(drawn: dict[str, list[Drawing]]) -> None:
    dots = [sum(line.count("1") for line in digit) for digit in _FONT]
    for one in drawn["number"]:
        assert len(inked(pixels_of(one))) == 16 * sum(dots[int(digit)] for digit in one.answer)
    assert len({one.answer for one in drawn["number"]}) > 30


def test_chance_is_that_of_the_commonest_answer_of_each_question() -> None:
    assert chance([("a", "x"), ("a", "x"), ("a", "y"), ("b", "z")]) == 0.75
