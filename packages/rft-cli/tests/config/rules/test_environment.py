"""Settings that contradict an environment, and those of conversations that nothing reads."""

from __future__ import annotations

import pytest

from rft.config.errors import SettingsError
from rft.reward_kinds import reward_flags
from rft_cli.config.resolve import resolve

CALCULATOR = "--environment calculator --apply_chat_template "
OWN = "--environment mine.py:Mine --apply_chat_template "


def problems(words: str, command: str = "rl") -> list[tuple[str, str]]:
    try:
        resolve(command, ["--pretrain", "m", *words.split()])
    except SettingsError as error:
        return [(problem.code, problem.do) for problem in error.problems]
    return []


def idle(words: str, command: str = "rl") -> list[str]:
    notes = resolve(command, ["--pretrain", "m", *words.split()]).notes
    return [note.partition(" = ")[0] for note in notes]


@pytest.mark.parametrize("command", ["rl", "eval"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (CALCULATOR, []),
        (OWN, []),
        ("--environment calculater", [("environment.unknown", "--environment calculator")]),
        ("--environment calculator", [("environment.no_chat", "--apply_chat_template")]),
        (f"{CALCULATOR} --reward exact", [("environment.two_judges", "leave reward out")]),
        (
            "--environment calculator --reward exact",
            [("environment.no_chat", "--apply_chat_template"), ("environment.two_judges", "leave reward out")],
        ),
        (f"{CALCULATOR} --turn_max_len 5 --generate_max_len 5", []),
        (
            f"{CALCULATOR} --turn_max_len 6 --generate_max_len 5",
            [("environment.turn_longer", "--turn_max_len 5")],
        ),
    ],
)
def test_an_environment_goes_with_a_template_and_without_another_judge(
    words: str, told: list[tuple[str, str]], command: str
) -> None:
    assert problems(words, command) == told


@pytest.mark.parametrize("flag", reward_flags())
def test_an_environment_is_the_only_judge(flag: str) -> None:
    told = problems(f"{CALCULATOR} --{flag} a")
    assert ("environment.two_judges", f"leave {flag} out") in told


OF_FILES = (
    "--environment_workers 3 --environment_memory 2 --environment_variables A --tool_timeout 5 --rollout_timeout 7"
)
OF_PROCESSES = ["environment_workers", "environment_memory", "environment_variables"]
NAMES_OF_FILES = [*OF_PROCESSES, "tool_timeout", "rollout_timeout"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (f"--max_turns 3 {OF_FILES}", [*OF_PROCESSES, "max_turns", "tool_timeout", "rollout_timeout"]),
        ("--turn_max_len 5 --tool_call_pattern a(.*)", ["turn_max_len", "tool_call_pattern"]),
        (f"{CALCULATOR} --max_turns 3 {OF_FILES}", NAMES_OF_FILES),
        (f"{OWN} --max_turns 3 {OF_FILES}", []),
        (CALCULATOR, []),
        ("", []),
    ],
)
@pytest.mark.parametrize("command", ["rl", "eval"])
def test_settings_of_conversations_are_told_where_nothing_reads_them(
    words: str, names: list[str], command: str
) -> None:
    assert idle(words, command) == names


@pytest.mark.parametrize(("words", "names"), [("--turn_gamma 0.5", ["turn_gamma"]), ("--turn_gamma none", [])])
def test_a_discount_between_turns_is_told_without_turns_unless_it_is_the_default(words: str, names: list[str]) -> None:
    assert idle(words) == names
