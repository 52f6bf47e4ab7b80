"""Names of runs: the recipe made safe, the day, a word, and a number where every word is taken."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from rft_trainer.runs import names
from rft_trainer.runs.names import WORDS, run_name

DAY = datetime.date(2025, 3, 1)


@pytest.fixture
def two_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "WORDS", ("acorn", "zinc"))


def test_words_are_plain_and_each_stands_once() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100
    assert all(word.isalpha() and word.islower() for word in WORDS)


@pytest.mark.parametrize(
    ("recipe", "stem"),
    [("a/b c", "a-b-c"), ("--x.y_z-", "x.y_z"), ("..", "run"), ("", "run"), ("É1", "1"), ("a//b", "a-b")],
)
def test_a_recipe_is_written_with_letters_digits_dots_dashes_and_underscores(
    recipe: str, stem: str, two_words: None
) -> None:
    assert run_name(recipe, today=DAY) in {f"{stem}-2025-03-01-acorn", f"{stem}-2025-03-01-zinc"}


def test_the_day_is_today_where_none_is_given(two_words: None) -> None:
    before = datetime.date.today().isoformat()
    name = run_name("a")
    assert name.rpartition("-")[0] in {f"a-{before}", f"a-{datetime.date.today().isoformat()}"}


def test_a_name_is_free_in_its_folder_and_numbered_from_2_where_every_word_is_taken(
    tmp_path: Path, two_words: None
) -> None:
    taken: set[str] = set()
    for _ in range(40):
        name = run_name("a", today=DAY, under=tmp_path)
        assert name not in taken
        (tmp_path / name).mkdir()
        taken.add(name)
    stems = {f"a-2025-03-01-{word}" for word in ("acorn", "zinc")}
    assert stems <= taken
    for stem in stems:
        numbers = sorted(int(name.removeprefix(f"{stem}-")) for name in taken - stems if name.startswith(stem))
        assert numbers == list(range(2, 2 + len(numbers)))
