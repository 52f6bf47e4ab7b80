"""What reaches a terminal steers it in no way, and can be read."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_core.terminal_text import visible


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
