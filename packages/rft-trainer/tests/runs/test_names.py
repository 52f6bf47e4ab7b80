"""Names of runs: the recipe made safe, the day, a word, and a number where every word is taken."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from rft_core.errors import OptionsError
from rft_trainer.runs import names
from rft_trainer.runs.names import WORDS, point_to_latest, refuse_file, run_name

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


@pytest.mark.parametrize(
    ("given", "there", "remedy"),
    [
        ("notes.txt", "notes.txt", "--save_path notes.txt-2"),
        ("notes.txt/run", "notes.txt", "--save_path runs/run-2"),
        ("/dev/null", "/dev/null", "--save_path runs/null-2"),
        ("/dev/null/run", "/dev/null", "--save_path runs/run-2"),
        ("gone", "gone", "--save_path runs/gone-2"),
    ],
)
def test_a_path_where_no_directory_can_be_made_is_refused_at_once(
    given: str, there: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    Path("gone").symlink_to("nowhere")
    with pytest.raises(OptionsError) as caught:
        refuse_file(Path(given))
    assert caught.value.problem.code == "run.not_a_directory"
    assert f"{there} is a" in caught.value.problem.what
    assert caught.value.problem.do == remedy
    assert Path("notes.txt").read_text() == "mine"
    refuse_file(Path(remedy.split()[1]))


def test_a_directory_that_is_there_or_can_be_made_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("linked").symlink_to("there")
    for given in ("there", "there/run", "linked", "new/a/b"):
        refuse_file(Path(given))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linked", "there"], "nothing is made yet"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of runs, of which two have begun."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    return tmp_path / "runs"


def test_the_run_that_began_last_has_a_relative_link(runs: Path) -> None:
    for name in ("first", "second", "first"):
        point_to_latest(Path("runs") / name)
        assert (runs / "latest").readlink() == Path(name)
    point_to_latest(runs / "second")
    assert (runs / "latest").resolve() == runs / "second"
    assert sorted(path.name for path in runs.iterdir()) == ["first", "latest", "second"]


def test_a_run_elsewhere_and_a_run_of_that_name_have_no_link(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    point_to_latest(tmp_path / "elsewhere")
    (runs / "latest").mkdir()
    for name in ("first", "latest"):
        point_to_latest(runs / name)
    assert not (runs / "latest").is_symlink()
    assert sorted(path.name for path in (*tmp_path.iterdir(), *runs.iterdir())) == [
        "elsewhere",
        "first",
        "latest",
        "runs",
        "second",
    ]


def test_a_run_begins_where_no_link_can_be_made(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    point_to_latest(runs / "first")
    assert sorted(path.name for path in runs.iterdir()) == ["first", "second"]
