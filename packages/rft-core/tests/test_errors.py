from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from rft_core import errors
from rft_core.errors import ExitCode, OptionsError, Problem, RftError, SettingsRefusal, install_command

FIELDS = {
    "code": "batch.not_a_multiple",
    "what": "train_batch_size = 500",
    "where": "--train_batch_size (command line)",
    "why": "it must be a multiple of 256",
    "state": "nothing was started",
    "do": "--train_batch_size 512",
    "bundle": "",
}


def all_errors() -> list[type[RftError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RftError)]


def test_the_text_gives_the_cause_first_and_leaves_out_empty_fields():
    lines = Problem(**FIELDS).as_text().splitlines()
    assert lines == [
        "train_batch_size = 500",
        "  where  --train_batch_size (command line)",
        "  why    it must be a multiple of 256",
        "  state  nothing was started",
        "  do     --train_batch_size 512",
    ]
    assert str(OptionsError(**FIELDS)) == "\n".join(lines)


HOSTILE = "x" * 100_000 + "\x1b[2J\n  do     rm -r /\n" + "y\n" * 100_000


def test_a_value_of_any_length_leaves_a_text_that_can_be_read_and_a_record_that_is_whole() -> None:
    remedy = f"--label_key {'k' * 3000}"
    error = OptionsError(code="a.b", what=HOSTILE, where=HOSTILE, why=HOSTILE, state=HOSTILE, do=remedy)
    lines = str(error).splitlines()
    labels = [line.split()[0] for line in lines[1:] if not line.startswith("    ")]
    assert labels == ["where", "why", "state", "do"]
    assert lines[-1] == f"  do     {remedy}"
    assert len(str(error)) < 4 * 5_000 + len(remedy)
    assert "\x1b" not in str(error)
    assert json.loads(error.as_json())["problem"]["what"] == error.problem.what == HOSTILE
    error.tell_state("told")
    assert str(error).splitlines()[:40] == lines[:40]


def test_four_fields_of_one_line_are_at_most_two_thousand_characters() -> None:
    line = "x" * 100_000
    error = OptionsError(code="a.b", what=line, where=line, why=line, state=line, do="--seed 1")
    assert sum(len(row.removeprefix("  ").partition("x")[2]) for row in str(error).splitlines()) <= 2000
    assert len(str(error)) <= 2000


def test_refused_settings_are_an_error_with_their_values() -> None:
    refusal = SettingsRefusal(code="freezing.two_ways", names=("first", "second"), why="one of them", do="--second 3")
    problem = refusal.as_error({"first": "a,b", "second": 3, "third": 4}).problem
    assert (problem.code, problem.why, problem.do) == ("freezing.two_ways", "one of them", "--second 3")
    assert (problem.what, problem.where) == ("first = a,b, second = 3", "--first, --second")


def test_the_json_is_one_line_with_all_fields_and_the_exit_code():
    line = Problem(**FIELDS).as_json(2)
    assert "\n" not in line
    assert json.loads(line) == {"problem": FIELDS, "exit_code": 2}


def test_every_error_ends_the_process_with_its_own_code():
    codes = {kind: kind.exit_code for kind in all_errors() if kind is not RftError}
    assert len(set(codes.values())) == len(codes)
    assert ExitCode.DONE not in codes.values()


@pytest.mark.parametrize("kind", all_errors())
def test_a_diagnostics_path_is_added_without_losing_kind_or_fields(kind: type[RftError]):
    found = kind(**FIELDS).with_bundle("/runs/a/diagnostics.tar")
    assert type(found) is kind
    assert found.problem == Problem(**(FIELDS | {"bundle": "/runs/a/diagnostics.tar"}))


@pytest.mark.parametrize("kind", all_errors())
def test_an_error_is_rebuilt_from_its_reduction_as_another_process_does(kind: type[RftError]):
    error = kind(**FIELDS)
    rebuild, arguments = error.__reduce__()
    assert callable(rebuild)
    again = rebuild(*arguments)
    assert type(again) is kind
    assert again.problem == error.problem
    assert str(again) == str(error)


@pytest.mark.parametrize("kind", all_errors())
def test_the_state_is_told_where_the_error_says_nothing_of_it(kind: type[RftError]):
    silent = {name: text for name, text in FIELDS.items() if name != "state"}
    error = kind(**silent)
    error.tell_state("step 3 is saved")
    assert error.problem == Problem(**(silent | {"state": "step 3 is saved"})) == error.problems[0]
    assert "step 3 is saved" in str(error)
    spoken = kind(**FIELDS)
    spoken.tell_state("step 3 is saved")
    assert spoken.problem == Problem(**FIELDS)


ROOT = Path(__file__).parents[3]
NAMED = re.compile(r'install_command\(["\'](\w+)["\']\)|--extra ([\w-]+)')


def test_every_extra_that_is_named_is_one_of_the_workspace() -> None:
    if not (ROOT / "uv.lock").is_file():
        pytest.skip("the package is tested alone")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")]
    named = {first or second for file in texts for first, second in NAMED.findall(file.read_text())}
    assert {"lora", "vllm", "vision", "deepspeed"} <= named
    assert named <= extras.keys()


def test_an_extra_is_added_to_the_others_and_brings_no_tools() -> None:
    assert install_command("lora") == "uv sync --no-dev --inexact --extra lora"
