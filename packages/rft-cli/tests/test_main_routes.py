"""The way of a command line through the program, with doubles of commands: what runs, when, and how it ends."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rft.config.command_record import Command
from rft.config.commands import typed
from rft.process import launching
from rft_cli.commands import table
from rft_cli.config import help as help_page
from rft_cli.config import stored_run
from rft_cli.config.resolve import resolve
from rft_cli.diagnostics import debug_mode, fault_injection, notices
from rft_cli.main import main, overview
from rft_cli.records.discovery import commands, find_command
from rft_core.errors import DataError

Calls = list[tuple[Any, ...]]
Ends = Callable[[Any], None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What happens on the way to a command, in order."""
    told: Calls = []
    monkeypatch.setattr(debug_mode, "switch_on", lambda environment: told.append(("debug", environment is os.environ)))
    monkeypatch.setattr(
        fault_injection, "install_from", lambda environment: told.append(("faults", environment is os.environ))
    )
    monkeypatch.setattr(notices, "show_notices", lambda: told.append(("notices",)))
    return told


@pytest.fixture
def ends(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Put doubles in the place of all commands; each ends with this exit code, or raises this error."""

    def install(outcome: Any) -> None:
        def run(argv: list[str]) -> int:
            calls.append(("run", *argv))
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        module = ModuleType("a_command")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "a_command", module)
        monkeypatch.setitem(commands(), "try", Command(name="try", summary="", run="a_command:run"))
        for name in ("rl", "eval", "generate"):
            double = replace(find_command(name), run="a_command:run", training=None)
            monkeypatch.setitem(commands(), name, double)

    return install


PREPARED: Calls = [("faults", True), ("notices",)]


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_runs_with_its_words_and_gives_the_exit_code(code: int, calls: Calls, ends: Ends) -> None:
    ends(code)
    assert main(["try", "a", "--help"]) == code
    assert calls == [*PREPARED, ("run", "a", "--help")]


def test_words_are_those_of_the_process_where_none_are_given(
    calls: Calls, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(0)
    monkeypatch.setattr(sys, "argv", ["rft-train", "try", "b"])
    assert main() == 0
    assert calls[-1] == ("run", "b")
    assert main(["try", "c"]) == 0
    assert calls[-1] == ("run", "c")


def test_debug_mode_is_on_before_anything_else(calls: Calls, ends: Ends) -> None:
    ends(0)
    assert main(["try", "--debug"]) == 0
    assert calls == [("debug", True), *PREPARED, ("run", "--debug")]


def test_the_overview_has_a_line_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    lines = overview().splitlines()
    told = [f"  {typed(command.name):<12} {command.summary}" for command in commands().values()]
    assert lines[5 : 6 + len(told)] == [*told, ""]
    assert lines[-1].endswith("rft-train quickstart")
    for words in ([], ["-h"], ["--help"], ["help", "rl"]):
        assert main(words) == 0
        assert capsys.readouterr().out == overview() + "\n"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rft-train {version('rft-cli')}\n"


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_of_a_command_with_settings_is_their_page(
    word: str, calls: Calls, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(0)
    monkeypatch.setattr(help_page, "print_help", lambda settings, argv: calls.append(("help", settings, argv)))
    assert main(["eval", "--seed", "1", word]) == 0
    assert calls == [("help", "eval", ["--seed", "1", word])]


@pytest.mark.parametrize("flag", ["--print_config", "--print-config"])
def test_a_configuration_is_printed_with_its_notes_and_nothing_runs(
    flag: str, calls: Calls, ends: Ends, capsys: pytest.CaptureFixture[str]
) -> None:
    ends(0)
    words = ["--pretrain", "m", "--max_pixels", "9"]
    assert main(["eval", flag, *words]) == 0
    resolved = resolve("eval", words)
    (note,) = resolved.notes
    assert capsys.readouterr().out == f"{resolved.config_yaml}# note: {note}\n"
    assert main(["try", flag]) == 0
    assert calls == [*PREPARED, ("run", flag)]


@pytest.mark.parametrize("name", ["eval", "generate"])
def test_a_configuration_may_be_that_of_a_run(
    name: str, ends: Ends, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends(0)
    asked: Calls = []

    def with_run(words: list[str], command: str) -> list[str]:
        asked.append((words, command))
        return ["--pretrain", "of the run"]

    monkeypatch.setattr(stored_run, "with_run", with_run)
    assert main([name, "run", "--print_config", "--seed", "1"]) == 0
    assert asked == [(["run", "--seed", "1"], name)]
    assert "pretrain: of the run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["rl", "--pretrain", "m"], 0),
        (["rl", "m"], 2),
        (["rl"], 2),
        (["eval", "--pretrain", "m"], 0),
        (["eval", "run"], 0),
        (["generate", "run", "--seed", "1"], 0),
        (["eval"], 2),
        (["eval", "run", "--sede", "1"], 2),
        (["eval", "--seed", "1", "run"], 2),
    ],
)
def test_settings_are_refused_before_the_command_is_imported(
    words: list[str], code: int, calls: Calls, ends: Ends
) -> None:
    ends(0)
    assert main(words) == code
    assert calls == ([] if code else [*PREPARED, ("run", *words[1:])])


@pytest.mark.parametrize("code", [0, 5, None])
def test_a_command_may_be_started_as_ranks(
    code: int | None, calls: Calls, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(3)

    def spawned(resolved: Any, words: list[str], nodes: object = None) -> int | None:
        calls.append(("spawned", resolved.values["pretrain"], words))
        return code

    monkeypatch.setattr(launching, "spawned", spawned)
    words = ["--pretrain", "m", "--nproc", "2"]
    begin = ("spawned", "m", [sys.executable, "-m", "rft_cli.main", "rl", *words])
    assert main(["rl", *words]) == (3 if code is None else code)
    assert calls == [begin, *([*PREPARED, ("run", *words)] if code is None else [])]
    calls.clear()
    assert main(["rl", "--pretrain", "m"]) == 3
    assert calls == [*PREPARED, ("run", "--pretrain", "m")]


@pytest.mark.parametrize("word", ["", "--seed", "zzzzzz", "rll", "train"])
def test_a_word_that_is_no_command_is_refused_with_a_command(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "--json_errors"]) == 2
    problem = json.loads(capsys.readouterr().err)["problem"]
    assert problem["code"] == "command.unknown"
    near = {
        "rll": "rl",
        "grpo": "rl --advantage_estimator grpo",
        "infer": "generate",
        "train": table.REFUSED_COMMANDS["train"].do.removeprefix("rft-train "),
    }
    assert problem["do"] == f"rft-train {near.get(word, '--help')}"


class Stream(io.StringIO):
    """A standard output with a descriptor, which counts how often it is flushed."""

    flushed = 0

    def fileno(self) -> int:
        return 77

    def flush(self) -> None:
        self.flushed += 1


def test_a_closed_pipe_is_no_failure_and_nothing_is_flushed_into_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Calls = []
    monkeypatch.setattr(sys, "stdout", Stream())
    monkeypatch.setattr(os, "open", lambda *given: opened.append(given) or 99)
    monkeypatch.setattr(os, "dup2", lambda *given: opened.append(given))
    ends(BrokenPipeError())
    assert main(["try"]) == 0
    assert opened == [(os.devnull, os.O_WRONLY), (99, 77)]


def test_the_output_is_flushed_before_the_program_ends(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    ends(0)
    assert main(["try"]) == 0
    assert stream.flushed == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_is_shown_as_it_is_asked_for(as_json: bool, ends: Ends, capsys: pytest.CaptureFixture[str]) -> None:
    error = DataError(code="a.b", what="the cause", where="here", why="a rule")
    ends(error)
    assert main(["try", *(["--json_errors"] if as_json else [])]) == int(DataError.exit_code)
    shown = capsys.readouterr().err
    if as_json:
        assert shown == error.as_json() + "\n"
    else:
        assert shown.split()[:3] == ["error", "the", "cause"]


@pytest.mark.parametrize("as_json", [False, True])
def test_what_nobody_foresaw_is_kept_in_a_file_and_told_shortly(
    as_json: bool, ends: Ends, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    ends(ZeroDivisionError("the first line\nthe second line"))
    with pytest.raises(ZeroDivisionError) as caught:
        main(["try", "a word", *(["--json_errors"] if as_json else [])])
    sys.excepthook(caught.type, caught.value, caught.tb)
    (path,) = tmp_path.glob("bundle-*.json")
    record = json.loads(path.read_text())
    assert record["command"] == ["rft-train", "try", "a word"]
    assert any("the second line" in line for line in record["traceback"])
    shown = capsys.readouterr().err
    assert str(path) in shown
    assert "the second line" not in shown
    if as_json:
        told = json.loads(shown)
        assert told["exit_code"] == 1
        assert (told["problem"]["code"], told["problem"]["bundle"]) == ("program.unexpected", str(path))
        assert told["problem"]["where"].startswith(f"{__file__}:")
    else:
        assert shown.startswith("error")
