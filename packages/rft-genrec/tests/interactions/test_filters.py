"""Filters of interactions."""

from datetime import UTC, datetime

import pytest
from interaction_rows import as_texts, table

from rft_genrec.interactions.filters import Core, first_of_repeats, in_window, is_title, k_core, year_before


@pytest.mark.parametrize(
    ("title", "is_kept"),
    [("", False), ("x", False), ("xy", True), (" ".join("w" * 20), True), (" ".join("w" * 21), False)],
)
def test_titles_are_kept_as_the_original_does(title: str, is_kept: bool) -> None:
    assert is_title(title) is is_kept
    assert not is_title(f"{title}<span id=a>")


def test_the_window_holds_both_its_ends() -> None:
    times = table("a x 1", "a x 2", "a x 3", "a x 4")
    assert in_window(times, 2, 3).tolist() == [False, True, True, False]
    assert in_window(times, None, 1).tolist() == [True, False, False, False]


def test_the_earliest_of_repeats_is_kept() -> None:
    rows = table("a x 9", "a x 3", "b x 5", "a y 1", "a x 3")
    assert first_of_repeats(rows).tolist() == [False, True, True, True, False]


def test_users_and_items_have_their_own_core() -> None:
    rows = [f"{user} {item} 1" for user in "abc" for item in "xyz"]
    kept, rounds = k_core(table(*rows, "d x 1", "d w 1", "a w 1"), Core(user_k=3, item_k=2))
    # d has too few; without d, w has too few
    assert as_texts(kept) == rows
    assert rounds == 3
    left, _ = k_core(table(*rows), Core(user_k=4, item_k=1))
    assert left.counts == (0, 0, 0)


def test_a_year_before_ends_in_1996() -> None:
    leap_day = int(datetime(2016, 2, 29, tzinfo=UTC).timestamp())
    earlier = year_before(leap_day)
    assert earlier == datetime(2015, 2, 28, tzinfo=UTC).timestamp()
    assert year_before(int(datetime(1996, 10, 1, tzinfo=UTC).timestamp())) is None
