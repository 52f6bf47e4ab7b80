"""How a failure is shown: to a person line by line, to a program as one line of JSON."""

from __future__ import annotations

import io
import json

import pytest

from rft.config.errors import SettingsError
from rft_cli.diagnostics.problems import show, show_problem, wants_json
from rft_core.errors import DataError, Problem

PROBLEM = Problem(
    code="a.b", what="the cause", where="here", why="a rule", state="unchanged", do="--do", bundle="f.json"
)


def lines(text: str) -> list[list[str]]:
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("argv", "environment", "json_asked", "rest"),
    [
        (["rl", "--json_errors", "--seed"], {}, True, ["rl", "--seed"]),
        (["--json-errors", "rl", "--json_errors"], {}, True, ["rl"]),
        (["rl"], {}, False, ["rl"]),
        (["rl"], {"RFT_ERRORS": "JSON"}, True, ["rl"]),
        (["rl"], {"RFT_ERRORS": "text"}, False, ["rl"]),
    ],
)
def test_json_is_asked_for_by_a_flag_or_by_the_environment(
    argv: list[str], environment: dict[str, str], json_asked: bool, rest: list[str]
) -> None:
    assert wants_json(argv, environment) is json_asked
    assert argv == rest


def test_one_problem_is_shown_with_every_field_that_it_has() -> None:
    stream = io.StringIO()
    show(DataError.of(PROBLEM), stream=stream)
    assert lines(stream.getvalue()) == [
        ["error", "the cause"],
        ["where", "here"],
        ["why", "a rule"],
        ["state", "unchanged"],
        ["do", "--do"],
        ["details", "f.json"],
    ]
    again = io.StringIO()
    show_problem(PROBLEM, 1, stream=again)
    assert again.getvalue() == stream.getvalue()


def test_empty_fields_are_left_out_and_long_ones_are_not_broken() -> None:
    stream = io.StringIO()
    show_problem(Problem(code="a", what="x " * 200, where="here", why="", state=""), 1, stream=stream)
    assert [words[0] for words in lines(stream.getvalue())] == ["error", "where"]


@pytest.mark.parametrize("several", [False, True])
def test_a_hostile_value_leaves_a_page_of_bounded_length_with_its_remedy(several: bool) -> None:
    value = "x" * 100_000 + "\x1b[2J\nerror  all is lost\n  do      rm -r /" + "\n" * 100_000 + "y" * 100_000
    remedy = f"--label_key {'k' * 3000}"
    problem = Problem(code="a.b", what=value, where=value, why=value, state=value, do=remedy)
    error = SettingsError(problems=[problem, problem]) if several else DataError.of(problem)
    stream = io.StringIO()
    show(error, stream=stream)
    page = stream.getvalue()
    assert len(page) < len(error.problems) * (4 * 5_000 + len(remedy))
    fields = [line for line in page.splitlines() if line.startswith("  ") and not line.startswith("    ")]
    assert [line for line in fields if line.startswith("  do")] == [f"  do      {remedy}"] * len(error.problems)
    assert [line[:10] for line in page.splitlines() if line.startswith("error")] == ["error  xxx"] * len(error.problems)
    assert "\x1b" not in page
    whole = io.StringIO()
    show(error, as_json=True, stream=whole)
    assert {each["what"] for each in json.loads(whole.getvalue()).get("problems", [])} <= {value}
    assert json.loads(whole.getvalue())["problem"]["do"] == remedy


def test_several_problems_share_their_state_and_their_bundle() -> None:
    stream = io.StringIO()
    second = Problem(code="c", what="another", where="there", why="a rule", do="--other")
    show(SettingsError(problems=[PROBLEM, second]).with_bundle("all.json"), stream=stream)
    told = lines(stream.getvalue())
    assert told[0][0] == "2"
    assert told[1:] == [
        *(["error", "the cause"], ["where", "here"], ["why", "a rule"], ["do", "--do"]),
        *(["error", "another"], ["where", "there"], ["why", "a rule"], ["do", "--other"]),
        ["details", "all.json"],
    ]
    assert stream.getvalue().count("\n\n") == 3
    bare = io.StringIO()
    show(SettingsError(problems=[PROBLEM, second]), stream=bare)
    assert lines(bare.getvalue()) == told[:-1]


def test_a_program_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    show(DataError.of(PROBLEM), as_json=True, stream=stream)
    show_problem(PROBLEM, 1, as_json=True, stream=stream)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["exit_code"], second["exit_code"]) == (int(DataError.exit_code), 1)
    assert first["problem"] == second["problem"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("as_json", [False, True])
def test_problems_go_to_standard_error(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    show(DataError.of(PROBLEM), as_json=as_json)
    show_problem(PROBLEM, 1, as_json=as_json)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("the cause") == 2
