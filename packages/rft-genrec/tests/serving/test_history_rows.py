"""Histories as JSON: each row is right or says what is wrong."""

from __future__ import annotations

import pytest

from rft_genrec.serving.history_rows import HistoryRow, answer, read_line, read_row
from rft_genrec.serving.recommendations import Recommended


def test_a_row_or_a_list_is_a_history() -> None:
    assert read_row({"user": "a", "history": [1, 2]}, 3, skip_unknown=False) == HistoryRow("a", (1, 2))
    assert read_row([1, 2], 3, skip_unknown=False) == HistoryRow(None, (1, 2))
    assert read_line('{"user": 7, "history": []}', 3, skip_unknown=False) == HistoryRow(7, ())


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("nonsense", "no JSON"),
        ('{"user": "a"}', "a list of item numbers is needed"),
        ('{"history": [true]}', "history holds True"),
        ('{"history": ["3"]}', "history holds '3'"),
        ('{"history": [1, 3]}', "unknown item 3: the catalogue has the items 0 to 2"),
        ('{"history": [-1]}', "unknown item -1"),
    ],
)
def test_what_is_wrong_is_said(line: str, word: str) -> None:
    assert word in read_line(line, 3, skip_unknown=False).error


def test_unknown_items_may_be_left_to_the_recommender() -> None:
    assert read_row([1, 3], 3, skip_unknown=True) == HistoryRow(None, (1, 3))


def test_an_answer_has_the_user_and_the_items_or_the_error() -> None:
    found = Recommended((4,), ("Saw",), (-1.5,), "a note")
    assert answer(HistoryRow("a", (1,)), found) == {
        "user": "a",
        "items": [4],
        "titles": ["Saw"],
        "scores": [-1.5],
        "note": "a note",
    }
    assert answer(HistoryRow(None, error="wrong"), None) == {"error": "wrong"}
