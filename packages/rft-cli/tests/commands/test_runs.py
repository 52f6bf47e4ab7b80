"""`rft-train runs`: which page a word means, and what is no run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft_cli.commands import runs
from rft_core.errors import RftError


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that say what they are of, in one long line."""

    def table(found: list[Any]) -> str:
        return "table " + " ".join(sorted(run.name for run in found)) + "." * 150

    monkeypatch.setattr(runs, "table_of_runs", table)
    monkeypatch.setattr(runs, "page_of_run", lambda run: f"page {run.path}" + "." * 150)


def made(*paths: str) -> None:
    for path in paths:
        Path(path).mkdir(parents=True)
        (Path(path) / "config.yaml").write_text("seed: 1\n")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], "table a b"),
        (["runs"], "table a b"),
        (["other"], "table c"),
        (["other/c"], "page other/c"),
        (["show", "a"], "page runs/a"),
        (["show", "runs/b"], "page runs/b"),
        (["show", "other/c"], "page other/c"),
    ],
)
def test_a_word_means_a_folder_of_runs_or_one_run(
    words: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made("runs/a", "runs/b", "other/c")
    assert runs.run(words) == 0
    assert capsys.readouterr().out == f"{shown}{'.' * 150}\n"


def test_a_line_of_a_pipe_is_broken_at_200_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made("runs/a")
    monkeypatch.setattr(runs, "page_of_run", lambda run: "x" * 450)
    assert runs.run(["show", "a"]) == 0
    assert list(map(len, capsys.readouterr().out.splitlines())) == [200, 200, 50]


@pytest.mark.parametrize("words", [[], ["empty"]])
def test_a_folder_without_runs_is_no_failure(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert runs.run(words) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("rft-train quickstart\n")
    assert "table" not in shown


@pytest.mark.parametrize(
    ("words", "code", "do"),
    [
        (["nowhere"], "run.unknown_name", "rft-train runs show alpha"),
        (["show", "beat"], "run.unknown_name", "rft-train runs show beta"),
        (["show"], "run.unknown_name", "rft-train runs show alpha"),
        (["show", "empty"], "run.unknown_name", ""),
        (["a", "b"], "option.stray", "rft-train runs --help"),
        (["show", "a", "b"], "option.stray", "rft-train runs show --help"),
        (["--all"], "option.unknown", "rft-train runs --help"),
    ],
)
def test_what_is_no_run_is_refused(words: list[str], code: str, do: str) -> None:
    made("runs/alpha", "runs/beta")
    Path("empty").mkdir()
    with pytest.raises(RftError) as caught:
        runs.run(words)
    problem = caught.value.problem
    assert (problem.code, problem.do.startswith("rft-train runs")) == (code, True)
    if do == "rft-train runs show alpha":
        assert problem.do in ("rft-train runs show alpha", "rft-train runs show beta")
    elif do:
        assert problem.do == do


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("empty", "empty is no run: it is a directory without config.yaml"),
        ("file", "file is no run: it is a file"),
        ("nothing", "no run is called nothing"),
    ],
)
def test_a_place_that_is_no_run_is_told_as_what_it_is(word: str, what: str) -> None:
    made("runs/alpha")
    Path("empty").mkdir()
    Path("file").write_text("")
    with pytest.raises(RftError) as caught:
        runs.run(["show", word])
    assert caught.value.problem.what == what


def test_without_any_run_the_quickstart_is_named() -> None:
    with pytest.raises(RftError) as caught:
        runs.run(["show", "a"])
    assert caught.value.problem.do == "rft-train quickstart"


@pytest.mark.parametrize("words", [["-h"], ["show", "--help"]])
def test_help_reads_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.run(words) == 0
    assert capsys.readouterr().out.startswith("usage: rft-train runs")
