"""Commands of other packages: those that can be used, and those that say why they cannot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rft.config.command_record import Command, TrainingRecord
from rft.config.commands import load
from rft_cli.main import main, overview
from rft_cli.records import discovery
from rft_cli.records.discovery import commands, find_command, run_command, training_of, with_settings

RECORD = """
from rft.config.command_record import Command, TrainingRecord
SAY = Command(name="say", summary="say a word", run="{module}:run")
def run(argv):
    print(*argv)
    return 7
"""

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write what an installation leaves: a module, and the entry points of its package."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(rows: str, source: str = RECORD) -> None:
        (tmp_path / "a_package.py").write_text(source.replace("{module}", "a_package"))
        facts = tmp_path / "a_package-1.0.dist-info"
        facts.mkdir(exist_ok=True)
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: a-package\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text(f"[rft.commands]\n{rows}\n")
        sys.modules.pop("a_package", None)
        commands.cache_clear()

    yield write
    monkeypatch.undo()
    sys.modules.pop("a_package", None)
    commands.cache_clear()


def test_a_command_of_another_package_runs_and_is_listed(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    built_in = list(commands())
    install("say = a_package:SAY", RECORD)
    assert list(commands()) == [*built_in, "say"]
    assert main(["say", "hello", "--loud"]) == 7
    assert capsys.readouterr().out == "hello --loud\n"
    assert "  say          say a word" in overview().splitlines()
    assert main(["sya"]) == 2
    assert "rft-train say" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "source", "name", "why"),
    [
        ("say = a_package:SAY", "1 / 0", "say", "a_package:SAY of a-package: ZeroDivisionError: division by zero"),
        ("say = a_package:TELL", RECORD, "say", "AttributeError"),
        ("say = not_there:SAY", RECORD, "say", "ModuleNotFoundError"),
        ("tell = a_package:SAY", RECORD, "tell", "a_package:SAY of a-package is no record of a command tell"),
        ("say = a_package:run", RECORD, "say", "is no record of a command say"),
        ("rl = a_package:SAY", RECORD, "rl@a-package", "there is another command rl"),
    ],
    ids=["import", "attribute", "module", "name", "kind", "clash"],
)
def test_a_record_that_cannot_be_used_says_why_and_harms_no_other_command(
    rows: str, source: str, name: str, why: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(rows, source)
    assert why in commands()[name].fault
    assert any(line.startswith(f"  {name} ") and "cannot be used: " in line for line in overview().splitlines())
    assert main([name, "--json_errors"]) == 2
    told = capsys.readouterr().err
    assert '"command.unusable"' in told
    assert why in told
    assert commands()["rl"].settings == "rft.settings:RlSettings"
    assert main(["runs"]) == 0


def test_a_command_is_run_by_its_function_or_by_what_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    from rft_cli.commands import runs, training

    told: list[object] = []
    monkeypatch.setattr(runs, "run", lambda argv: told.append(argv) or 3)  # type: ignore[func-returns-value]
    monkeypatch.setattr(training, "run", lambda name, argv: told.append((name, argv)) or 4)  # type: ignore[func-returns-value]
    assert run_command(find_command("runs"), ("a", "b")) == 3
    assert run_command(find_command("sft"), ["c"]) == 4
    assert told == [["a", "b"], ("sft", ["c"])]


def test_records_name_what_is_there() -> None:
    for command in commands().values():
        names = [command.run, command.act, command.settings, command.rules, command.notes]
        if command.training:
            training = training_of(command.name)
            functions = {*type(training).__dataclass_fields__} - {"purpose", "measure", "held_out", "line", "curves"}
            names += [getattr(training, field) for field in functions]
        assert [bool(command.run), bool(command.act), bool(command.training)].count(True) == 1
        for name in names:
            assert not name or load(name) is not None
    trained = {name for name in with_settings() if find_command(name).training and not find_command(name).extends}
    assert trained == {"rl", "sft", "pretrain", "dpo", "rm"}


@pytest.mark.parametrize(
    ("name", "makes_runs", "takes_run", "result"),
    [
        ("rl", True, False, "run"),
        ("sft", True, False, "run"),
        ("quickstart", True, False, None),
        ("resume", True, False, None),
        ("recipes", True, False, None),
        ("eval", False, True, "output"),
        ("generate", False, True, "output"),
        ("build", False, False, "model"),
        ("tokenizer", False, False, "tokenizer"),
        ("conformance", False, False, None),
        ("runs", False, False, None),
        ("check", False, False, None),
        ("plan", False, False, None),
        ("export", False, False, None),
    ],
)
def test_what_other_commands_ask_of_a_record(name: str, makes_runs: bool, takes_run: bool, result: str | None) -> None:
    record: Command = find_command(name)
    assert (record.makes_runs, record.takes_run, record.stage_result) == (makes_runs, takes_run, result)


def test_a_record_has_what_it_leaves_empty_from_the_command_that_it_extends() -> None:
    base = find_command("sft")
    mine = Command(name="ours-sft", summary="ours", extends="sft", training=TrainingRecord(train="ours:train"))
    completed = mine.completed(base)
    assert (completed.name, completed.summary, completed.settings) == ("ours-sft", "ours", base.settings)
    assert completed.training is not None
    assert base.training is not None
    assert completed.training.train == "ours:train"
    assert completed.training.check == base.training.check
    assert completed.training.measure == base.training.measure
    assert not mine.completed(find_command("rl")).is_default


def test_two_words_may_name_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: Command(name=name, summary="") for name in ("rl", "ours-data", "rm")}
    monkeypatch.setattr(discovery, "commands", lambda: known)
    assert discovery.command_of_words(["ours", "data", "--x"]) == ("ours-data", ["--x"])
    assert discovery.command_of_words(["ours-data", "--x"]) == ("ours-data", ["--x"])
    assert discovery.command_of_words(["rl", "data"]) == ("rl", ["data"])
    assert discovery.command_of_words(["none"]) == ("none", [])


def test_first_words_stand_for_a_flag_that_was_left_out() -> None:
    several = Command(name="x", summary="", first_word="folders", takes_words=True)
    assert several.with_flag(["a", "b", "--port", "1"]) == ["--folders", "a,b", "--port", "1"]
    assert several.with_flag(["--port", "1"]) == ["--port", "1"]
    one = Command(name="x", summary="", first_word="run")
    assert one.with_flag(["a", "b"]) == ["--run", "a", "b"]
    assert Command(name="x", summary="").with_flag(["a"]) == ["a"]
