"""Cells that hold a list."""

import pytest

from rft_genrec.catalogue.list_cells import parse_numbers, parse_texts

HOSTILE = [
    "__import__('os').system('touch /tmp/owned')",
    "[__import__('os').getpid()]",
    "[" * 100_000 + "]" * 100_000,
    "['a', ['b']]",
    "[1 + 1]",
    "[lambda: 0]",
    "(1,)",
    "{1}",
    "[0x10]",
    "[-1]",
    "[1.0]",
    "[True]",
    "['a' 'b']",
    "['a'] + []",
    "f'{1}'",
    "['a",
    "[",
    "",
    "nan",
    "['\\ud800']",
    "['\\U00110000']",
]


@pytest.mark.parametrize("cell", HOSTILE)
def test_whatever_is_no_list_is_refused_and_not_evaluated(cell: str) -> None:
    assert parse_numbers(cell) is None
    assert parse_texts(cell) is None


def test_numbers_are_read() -> None:
    assert parse_numbers(" [3112,  4] ") == (3112, 4)
    assert parse_numbers("[]") == parse_numbers("[ ]") == ()
    assert parse_numbers("[1,]") is None
    assert parse_numbers(f"[{'9' * 5000}]") is None


@pytest.mark.parametrize(
    "texts",
    [
        [],
        ["a saw"],
        ["it's", 'a "b"', "both ' and \""],
        ["back\\slash", "tab\tline\nend\r", "\x01\u2028\U0001f600é", "]", "', '"],
        ["", ""],
    ],
)
def test_texts_are_read_as_python_writes_them(texts: list[str]) -> None:
    assert parse_texts(str(texts)) == tuple(texts)
    assert parse_texts(ascii(texts)) == tuple(texts)
