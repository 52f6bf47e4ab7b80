"""A new command of `rft-train` is one file and one row: help, settings, errors and exit codes come with it."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import rft_cli
from rft_cli.main import main
from rft_cli.records.discovery import commands, find_command

SOURCE = Path(next(iter(rft_cli.__path__)))
MOST_LINES = 120
BODIES_IN_THE_LIBRARY = ("eval", "generate", "conformance", "build", "export", "check", "plan")
"""Commands whose module holds words, printing and pages alone."""

HELLO = '''
"""`rft-train hello`: say what a model would be built from."""

from rft_cli.config.resolve import resolve
from rft_core.errors import OptionsError


def run(argv: list[str]) -> int:
    """Greet the texts; a greeting without a place is refused."""
    settings = resolve("hello", argv).settings
    if settings.output.save_path == "nowhere":
        raise OptionsError(code="hello.nowhere", what="nowhere", where="--save_path", why="it is a place", do="--x")
    print(f"hello {settings.data.texts}")
    return 0
'''


@pytest.fixture(autouse=True)
def hello(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and the row of a new command."""
    (tmp_path / "hello_command.py").write_text(HELLO)
    monkeypatch.syspath_prepend(tmp_path)
    record = replace(find_command("build"), name="hello", summary="greet the texts of a model", run="hello_command:run")
    monkeypatch.setitem(commands(), "hello", record)


def test_one_file_and_one_row_are_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hello", "--texts", "rows.jsonl", "--save_path", "model"]) == 0
    assert capsys.readouterr().out == "hello rows.jsonl\n"


def test_help_and_the_overview_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert re.search(r"^  hello +greet the texts of a model$", capsys.readouterr().out, re.M)
    assert main(["hello", "--help"]) == 0
    assert "--vocab_size INT" in capsys.readouterr().out


def test_its_settings_and_its_own_errors_are_shown_as_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hello", "--texts", "rows.jsonl", "--save_path", "nowhere", "--json_errors"]) == 2
    assert '"hello.nowhere"' in capsys.readouterr().err
    assert main(["hello", "--tets", "rows.jsonl"]) == 2
    assert "--texts" in capsys.readouterr().err
    assert main(["helo"]) == 2
    assert "rft-train hello" in capsys.readouterr().err


@pytest.mark.parametrize("name", BODIES_IN_THE_LIBRARY)
def test_a_command_of_the_library_is_a_short_file(name: str) -> None:
    spec = find_spec(find_command(name).run.partition(":")[0])
    assert spec is not None
    assert spec.origin is not None
    num_lines = len(Path(spec.origin).read_text().splitlines())
    assert num_lines <= MOST_LINES, f"{name}: {num_lines} lines; its body belongs into the library `rft`"


@pytest.mark.parametrize("name", ["build", "generate", "conformance", "export"])
def test_one_row_alone_names_the_file_of_a_command(name: str) -> None:
    module = find_command(name).run.partition(":")[0]
    pattern = re.compile(rf"{re.escape(module)}\b|from rft_cli\.commands import [^\n]*\b{name}\b")
    naming = [str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if pattern.search(file.read_text())]
    assert naming == ["commands/table.py"]
