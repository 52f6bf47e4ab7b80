"""The program as a whole: help without torch, exit codes, how failures are shown and kept."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rft.config.command_record import Command
from rft.config.commands import typed
from rft.config.schema import REQUIRED, schema
from rft_cli.commands import table
from rft_cli.config.resolve import resolve
from rft_cli.diagnostics import bundle, debug_mode, fault_injection
from rft_cli.main import main
from rft_cli.records.discovery import commands, find_command, with_settings
from rft_core import errors
from rft_core.errors import ExitCode, RftError, SavedAfterSignal

Program = Callable[..., subprocess.CompletedProcess[str]]

WITHOUT_TORCH = """
import sys
from rft_cli.main import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules and "transformers" not in sys.modules, "torch was imported"
sys.exit(code)
"""

BREAKING = """
import sys, types
from pathlib import Path
from rft_cli.diagnostics import bundle; from rft.config.command_record import Command
from rft_cli.records.discovery import commands, find_command
from rft_cli.main import main
def run(argv):
    if "--in_run" in argv:
        bundle.remember_run_directory(Path("run"))
    return 1 // len(argv[:0])
sys.modules["breaking"] = types.SimpleNamespace(run=run)
commands()["break"] = Command(name="break", summary="", run="breaking:run")
sys.exit(main(sys.argv[1:]))
"""

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RftError)]


def command(monkeypatch: pytest.MonkeyPatch, run: Callable[[list[str]], int]) -> None:
    """Put a command called `try` into the table."""
    module = ModuleType("a_command")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_command", module)
    monkeypatch.setitem(commands(), "try", Command(name="try", summary="", run="a_command:run"))


def failing(kind: type[RftError]) -> Callable[[list[str]], int]:
    def run(argv: list[str]) -> int:
        raise kind(code="test.broken", what="the cause", where="here", why="a rule", do="--do this")

    return run


@pytest.mark.parametrize("argv", [["--help"], ["runs"], ["recipes"], ["runs", "--help"], ["--version"]], ids=" ".join)
def test_pages_that_need_no_torch_import_none(python: Program, argv: list[str]) -> None:
    done = python(WITHOUT_TORCH, *argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("name", with_settings())
def test_help_of_a_command_lists_every_flag_and_imports_no_torch(python: Program, name: str) -> None:
    done = python(WITHOUT_TORCH, name, "--help-all")
    assert (done.returncode, done.stderr) == (0, "")
    for flag in schema(name):
        assert re.search(rf"--{flag}\b", done.stdout), flag
    required = [flag for flag, row in schema(name).items() if row.default is REQUIRED]
    assert all(f"--{flag} STR" in done.stdout or schema(name)[flag].choices for flag in required)
    assert ("(required)" in done.stdout) is bool(required)


@pytest.mark.parametrize("name", ["rl", "sft"])
def test_short_help_has_what_most_runs_choose_and_imports_no_torch(python: Program, name: str) -> None:
    essential = find_command(name).essential.split()
    done = python(WITHOUT_TORCH, name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert set(re.findall(r"--(\w+)\b", done.stdout.partition("\u256d")[2])) >= set(essential)
    assert not re.search(r"--heartbeat_seconds\b", done.stdout)
    number = len(schema(name)) - len(set(essential) & set(schema(name)))
    assert f"{number} settings more, and the whole text of each: rft-train {name} --help-all" in done.stdout
    assert ("--advantage_estimator NAME" in done.stdout) is (name == "rl")


def test_help_shows_the_values_of_a_recipe(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--config", "addition", "--help-all"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    assert "(default: 4)" in shown.partition("--n_samples_per_prompt")[2][:200]


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == main(["help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {typed(name)} " in shown for name in commands())


def test_settings_are_refused_before_torch_is_imported(python: Program) -> None:
    done = python(WITHOUT_TORCH, "rl", "--rolout_batch_size", "4", "--bf16", "maybe")
    assert done.returncode == ExitCode.OPTIONS
    assert "Traceback" not in done.stderr
    assert all(
        part in done.stderr for part in ("--rolout_batch_size", "--rollout_batch_size 4", "--bf16", "--pretrain")
    )


def test_print_config_starts_nothing_and_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--print-config", "--pretrain", "m", "--seed", "3"]) == 0
    Path("written.yaml").write_text(capsys.readouterr().out)
    assert resolve("rl", ["--config", "written.yaml"]).values["seed"] == 3


@pytest.mark.parametrize(
    ("word", "nearest"), [("quikstart", "quickstart"), ("rll", "rl"), ("evl", "eval"), ("run", "runs")]
)
def test_an_unknown_command_names_the_nearest(word: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert f"do      rft-train {nearest}" in capsys.readouterr().err


@pytest.mark.parametrize("word", table.REFUSED_COMMANDS)
def test_a_command_of_a_later_version_is_refused_by_name(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "--json_errors"]) == 2
    problem = json.loads(capsys.readouterr().err)["problem"]
    assert word in problem["what"]
    assert problem["do"].startswith(("rft-train ", "python "))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_of_error_ends_with_its_code_and_seven_fields(
    kind: type[RftError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, failing(kind))
    assert main(["try", "--json_errors"]) == int(kind.exit_code)
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert record["exit_code"] == int(kind.exit_code)
    assert set(record["problem"]) == {"code", "what", "where", "why", "state", "do", "bundle"}


def test_a_person_reads_the_cause_first_then_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, failing(SavedAfterSignal))
    assert main(["try"]) == 75
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split(maxsplit=1) == ["error", "the cause"]
    assert [line.split()[0] for line in lines[1:]] == ["where", "why", "state", "do"]


def test_problems_are_one_json_line_where_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RFT_ERRORS", "json")
    assert main(["rl", "--print_config", "--sede", "1", "--bf16", "maybe"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert [problem["code"] for problem in record["problems"]] == ["option.unknown", "option.value", "option.missing"]
    assert record["exit_code"] == 2


def test_brackets_of_a_message_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["[bold]x[/bold]"]) == 2
    assert "[bold]x[/bold]" in capsys.readouterr().err


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(argv: list[str]) -> int:
        raise KeyboardInterrupt

    command(monkeypatch, run)
    assert main(["try"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    # where a run was under way, what is lost of it and how it goes on
    Path("a run").mkdir()
    monkeypatch.setattr(bundle._Context, "run_directory", Path("a run"))
    assert main(["try"]) == 130
    assert capsys.readouterr().err.endswith("rft-train resume 'a run'\n")


def test_a_failure_inside_a_run_leaves_a_bundle_with_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_directory = Path("run")
    run_directory.mkdir()
    (run_directory / "config.yaml").write_text("seed: 42  # default\n")
    (run_directory / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')

    def run(argv: list[str]) -> int:
        bundle.remember_run_directory(run_directory)
        return failing(errors.NumericsError)(argv)

    command(monkeypatch, run)
    secret = "hf_" + "a" * 30
    monkeypatch.setenv("RFT_TOKEN", secret)
    assert main(["try", "--json_errors", "--my_api_key", "letmein", secret]) == 7
    problem = json.loads(capsys.readouterr().err)["problem"]
    path = Path(problem["bundle"])
    assert path.parent == run_directory
    text = path.read_text()
    assert secret not in text
    assert "letmein" not in text
    record = json.loads(text)
    assert record["settings"] == ["seed: 42  # default"]
    assert record["last_metrics"] == [{"step": 1}, {"step": 2}]
    assert record["problem"]["what"] == "the cause"
    assert record["versions"]["torch"]
    assert any("NumericsError" in line for line in record["traceback"])


def test_what_nobody_foresaw_becomes_a_file_and_a_short_message(python: Program, tmp_path: Path) -> None:
    done = python(BREAKING, "break", TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "unexpected ZeroDivisionError" in done.stderr
    (path,) = tmp_path.glob("bundle-*.json")
    assert str(path) in done.stderr
    assert any("ZeroDivisionError" in line for line in json.loads(path.read_text())["traceback"])


def test_an_unforeseen_failure_of_a_run_is_kept_with_the_run_and_told_as_json(python: Program, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    done = python(BREAKING, "break", "--in_run", RFT_ERRORS="json")
    record = json.loads(done.stderr)
    assert (done.returncode, record["exit_code"]) == (1, 1)
    assert (tmp_path / record["problem"]["bundle"]).parent == tmp_path / "run"


@pytest.mark.parametrize(
    ("argv", "on"),
    [
        (["--debug"], True),
        (["--debug", "--seed", "1"], True),
        (["--debug=true"], True),
        (["--debug", "no"], False),
        (["--debug", "--no-debug"], False),
        ([], False),
        (["--seed", "1"], False),
    ],
)
def test_debug_is_seen_before_anything_is_imported(argv: list[str], on: bool) -> None:
    assert debug_mode.asked(argv) is on


def test_debug_sets_only_what_the_person_has_not_set() -> None:
    environment = {"NCCL_DEBUG": "WARN"}
    changed = debug_mode.switch_on(environment)
    assert environment["NCCL_DEBUG"] == "WARN"
    assert environment["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert "NCCL_DEBUG" not in changed


FAULTY = """
import os, sys
from rft_core import fault_points
from rft_cli.diagnostics import fault_injection
point = fault_points.declare("test.point", "a test")
fault_injection.install_from(os.environ)
for i in range(3):
    print(i, flush=True)
    fault_points.fault_point(point)
"""


@pytest.mark.parametrize(
    ("text", "passes", "status"),
    [
        ("test.point", 1, fault_injection.EXIT_STATUS),
        ("test.point:2", 2, fault_injection.EXIT_STATUS),
        ("test.point:3:kill", 3, -signal.SIGKILL),
        ("test.point:1:raise", 1, 1),
        ("other.point", 3, 0),
        ("other.point,test.point:2:exit", 2, fault_injection.EXIT_STATUS),
        ("", 3, 0),
    ],
)
def test_a_fault_strikes_at_its_point_and_pass(python: Program, text: str, passes: int, status: int) -> None:
    done = python(FAULTY, RFT_FAULT=text)
    assert (len(done.stdout.split()), done.returncode) == (passes, status)


@pytest.mark.parametrize("text", ["p:0", "p:x", "p:1:explode", ":1", "p:1:exit:2"])
def test_a_fault_that_cannot_be_understood_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_FAULT", text)
    assert main(["runs"]) == 2


def test_a_reader_that_goes_away_is_no_failure(python: Program) -> None:
    program = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "recipes", "--help"], stdout=subprocess.PIPE)
child.stdout.close()
print(child.wait())
"""
    done = python(program, WITHOUT_TORCH)
    assert (done.stdout.strip(), done.stderr) == ("0", "")


def test_secrets_of_the_environment_are_not_in_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_PASSWORD", "open sesame")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    record = bundle.contents(ValueError("https://me:hunter2@host/x failed"), ["rl"])
    text = json.dumps(record)
    assert not any(secret in text for secret in ("open sesame", "x" * 40, "hunter2"))
    assert os.environ["RFT_PASSWORD"] == "open sesame"


def test_names_that_only_sound_like_secrets_are_kept() -> None:
    from rft_core.secrets import scrub, scrub_command

    row = {"time/tokens_per_second": 5.0, "input_key": "question", "data/tokens": 12, "label_key": "answer"}
    assert scrub(row) == row
    argv = ["rl", "--label_key", "answer", "--pretrain", "/models/0123abcd"]
    assert scrub_command(argv) == argv


@pytest.mark.parametrize("words", [["--help"], ["runs", "no such folder"]])
def test_what_does_not_fit_into_the_output_is_a_storage_error(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no such folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main([*words, "--json_errors"]) == 6
    problem = json.loads(capsys.readouterr().err.splitlines()[-1])["problem"]
    assert problem["code"] == "storage.output"


def test_nobody_but_owner_and_group_can_write_what_the_program_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["rft-train", "--version"])
    before = os.umask(0)
    try:
        assert main() == 0
        (tmp_path / "file").write_text("x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o664
