"""What reaches a terminal steers it in no way, and can be read."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_core.terminal_text import LONGEST_FIELD, LONGEST_LINE, MOST_LINES, bounded, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("done\rerror", r"done\rerror"),
        ("\x9b31m", r"\x9b31m"),
        ("a\x08b\x7f", r"a\x08b\x7f"),
        ("txt\u202egpj.exe", r"txt\u202egpj.exe"),
        ("\ud800", r"\ud800"),
        ("one\ttwo\nthree", "one\ttwo\nthree"),
        ("47+25=72 \u00e9\u4e2d\U0001f98a \\x1b", "47+25=72 \u00e9\u4e2d\U0001f98a \\x1b"),
        ("", ""),
    ],
)
def test_what_steers_a_terminal_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    left = {letter for letter in visible(text) if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")}
    assert left <= {"\n", "\t"}
    assert visible(visible(text)) == visible(text)


@pytest.mark.parametrize(
    "text",
    ["", "one", "x" * LONGEST_LINE, "a\n    b\n    c", "\n".join(["one", *["    " + "x" * 90] * (MOST_LINES - 1)])],
)
def test_a_field_that_a_person_can_read_is_left_as_it_is(text: str) -> None:
    assert bounded(text) == text


def test_the_middle_of_a_long_line_is_left_out() -> None:
    shown = bounded(f"--label_key = {'x' * 100_000} is the name of no column")
    assert shown.startswith("--label_key = xxx")
    assert shown.endswith("xxx is the name of no column")
    assert " ... 99,589 characters left out ... " in shown
    assert len(shown) <= LONGEST_LINE
    assert len(bounded("x" * (LONGEST_LINE + 1))) < LONGEST_LINE


def test_the_last_lines_of_a_long_field_are_left_out() -> None:
    many = bounded("\n".join(map(str, range(1000)))).splitlines()
    assert many == ["0", *(f"    {number}" for number in range(1, MOST_LINES)), "    ... 960 lines left out"]
    wide = bounded("\n".join(["    " + "x" * 396] * 15)).splitlines()
    assert wide == [*["    " + "x" * 396] * 10, "    ... 5 lines left out"]


def test_no_line_of_a_value_reads_as_a_field() -> None:
    assert bounded("a\n  do      rm -r /\nerror  b\n    c") == "a\n      do      rm -r /\n    error  b\n    c"


@given(st.text(alphabet=st.sampled_from("a \n\t\x1b\u202e\ud800"), max_size=80), st.integers(1, 3000))
def test_a_field_is_bounded_whatever_it_holds(text: str, times: int) -> None:
    lines = bounded(text * times).split("\n")
    assert len(lines) <= MOST_LINES + 1
    assert sum(map(len, lines)) <= LONGEST_FIELD + LONGEST_LINE
    assert all(line.startswith("    ") for line in lines[1:])
    assert visible("\n".join(lines)) == "\n".join(lines)
