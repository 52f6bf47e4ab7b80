"""Texts of single tokens: together they are the text, whatever a tokenizer does at the borders."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rft_models.tokenization.token_pieces import token_pieces


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


WORDS = ["\u2581the", "\u2581cat", "s", "\u2581", "x"]


def decode_words(ids: Sequence[int]) -> str:
    """As tokenizers of sentencepiece do: the space before the first word is left out."""
    return "".join(WORDS[i] for i in ids).replace("\u2581", " ").removeprefix(" ")


@given(st.text(max_size=40))
def test_pieces_of_bytes_are_the_text(text: str) -> None:
    ids = list(text.encode())
    pieces = token_pieces(decode_bytes, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    assert token_pieces(decode_bytes, list("a\u20acb".encode())) == ["a", "", "", "\u20ac", "b"]


def test_an_unfinished_character_at_the_end_is_shown() -> None:
    assert token_pieces(decode_bytes, list("a\u20ac".encode())[:-1])[-1] == "\ufffd"


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=30))
def test_spaces_before_words_are_kept(ids: list[int]) -> None:
    assert "".join(token_pieces(decode_words, ids)) == decode_words(ids)


def test_of_nothing_there_are_no_pieces() -> None:
    assert token_pieces(decode_bytes, []) == []
