"""Words and switches of the verbs without settings."""

from __future__ import annotations

from typing import Any

import pytest

from rft_cli.commands.arguments import Arguments, parse, unknown_command
from rft_core.errors import ExitCode, OptionsError

NAMES: dict[str, Any] = {"most": 2, "switches": ["quick", "all_of_it"], "options": ["seed", "save_path"]}


@pytest.mark.parametrize(
    ("text", "words", "switches", "values"),
    [
        ("", [], set(), {}),
        ("a b", ["a", "b"], set(), {}),
        ("--quick a", ["a"], {"quick"}, {}),
        ("a --all-of-it --quick", ["a"], {"quick", "all_of_it"}, {}),
        ("--seed 3 a", ["a"], set(), {"seed": "3"}),
        ("--save-path=x=y a b", ["a", "b"], set(), {"save_path": "x=y"}),
        ("--seed= a", ["a"], set(), {"seed": ""}),
        ("--seed --quick", [], set(), {"seed": "--quick"}),
        ("--seed 3 --seed 4", [], set(), {"seed": "4"}),
        ("--seed -1", [], set(), {"seed": "-1"}),
    ],
)
def test_words_switches_and_values_are_told_apart(
    text: str, words: list[str], switches: set[str], values: dict[str, str]
) -> None:
    assert parse("verb", text.split(), **NAMES) == Arguments(words, switches, [], values)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("a", []),
        ("a --quick --lr 1 b", ["--lr", "1", "b"]),
        ("a -x --quick", ["-x", "--quick"]),
        ("a --quick=1 b c d", ["--quick=1", "b", "c", "d"]),
    ],
)
def test_flags_of_another_parser_are_kept_for_it(text: str, rest: list[str]) -> None:
    parsed = parse("verb", text.split(), **NAMES, keep_flags=True)
    assert (parsed.words, parsed.rest) == (["a"], rest)
    assert parsed.switches == ({"quick"} if text.startswith("a --quick ") else set())


@pytest.mark.parametrize(
    ("text", "keep", "code", "do"),
    [
        ("--sede 3", False, "option.unknown", "--seed"),
        ("--quik", False, "option.unknown", "--quick"),
        ("--quick=1", False, "option.unknown", "--quick"),
        ("-x", False, "option.unknown", "rft-train verb --help"),
        ("--zzzzzz", False, "option.unknown", "rft-train verb --help"),
        ("a --seed", False, "option.no_value", "rft-train verb --help"),
        ("a b c", False, "option.stray", "rft-train verb --help"),
        ("a b c --lr 1", True, "option.stray", "rft-train verb --help"),
    ],
)
def test_what_a_verb_does_not_take_is_refused(text: str, keep: bool, code: str, do: str) -> None:
    with pytest.raises(OptionsError) as caught:
        parse("verb", text.split(), **NAMES, keep_flags=keep)
    problem = caught.value.problem
    assert (problem.code, problem.where, problem.do) == (code, "command line", do)


def test_a_verb_may_take_nothing() -> None:
    assert parse("verb", [], most=0) == Arguments([], set(), [])
    with pytest.raises(OptionsError, match="'a'"):
        parse("verb", ["a"], most=0)


def test_a_word_that_is_not_there_is_the_default() -> None:
    arguments = Arguments(["a", "b"], set(), [])
    assert [arguments.word(index) for index in range(3)] == ["a", "b", ""]
    assert (arguments.word(1, "c"), arguments.word(2, "c")) == ("b", "c")


def test_an_unknown_command_ends_with_the_code_of_options() -> None:
    error = unknown_command("what", "why", "do this")
    assert (error.exit_code, error.problem.code, error.problem.do) == (ExitCode.OPTIONS, "command.unknown", "do this")
