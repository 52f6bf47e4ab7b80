"""Settings of reward models, servers and judges: which contradict one another, and which nothing reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rft.config.errors import SettingsError
from rft.config.rules.rewards import idle_reward_settings
from rft.reward_kinds import reward_flags
from rft_cli.config.resolve import resolve

MODEL = ["reward_offload", "reward_batch_tokens"]
SERVERS = ["remote_rm_timeout", "remote_rm_concurrency", "remote_rm_retries", "reward_wait", "on_reward_outage"]
JUDGE = ["judge_template", "task_instruction", "judge_pattern", "judge_range", "judge_max_new_tokens"]
BATCH, NAME = "remote_rm_batch_size", "judge_model"
FUNCTION = ["reward_workers", "reward_timeout", "reward_memory", "reward_variables"]
RANDOM = "reward_random"
"""Of functions of one's own and of servers."""


def idle(**given: Any) -> list[str]:
    names = {
        *reward_flags(),
        "reward",
        "reward_routes",
        "reward_random",
        "reward_pretrain",
        "remote_rm_url",
        "judge_url",
        "judge_pretrain",
    }
    values: Mapping[str, Any] = dict.fromkeys(names, "") | given
    return [name for name, _ in idle_reward_settings(values)]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, [*MODEL, BATCH, *SERVERS, NAME, *JUDGE, RANDOM]),
        ({"reward": "exact"}, [*MODEL, BATCH, *SERVERS, NAME, *JUDGE, RANDOM]),
        ({"reward": "own.py:score"}, [*MODEL, BATCH, *SERVERS, NAME, *JUDGE]),
        ({"reward_pretrain": "a"}, [BATCH, *SERVERS, NAME, *JUDGE, *FUNCTION, RANDOM]),
        ({"reward_pretrain": "a", "reward": "exact"}, [BATCH, *SERVERS, NAME, *JUDGE, RANDOM]),
        ({"remote_rm_url": "a"}, [*MODEL, NAME, *JUDGE, *FUNCTION]),
        ({"judge_url": "a"}, [*MODEL, BATCH, *FUNCTION, RANDOM]),
        ({"judge_pretrain": "a"}, [*MODEL, BATCH, *SERVERS, NAME, *FUNCTION, RANDOM]),
        ({"judge_url": "a", "remote_rm_url": "b", "reward_pretrain": "c", "reward": "exact"}, []),
    ],
)
def test_settings_are_idle_until_what_reads_them_is_named(given: dict[str, str], names: list[str]) -> None:
    assert idle(**given) == names


def test_a_command_without_rewards_has_none_that_are_idle() -> None:
    assert list(idle_reward_settings({"seed": 1})) == []


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        ("--judge_pretrain a", []),
        ("--judge_url http://a --judge_model b", []),
        ("--judge_url http://a", ["reward.judge_model"]),
        ("--judge_pretrain a --judge_url http://a --judge_model b", ["reward.two_judges"]),
        ("--judge_pretrain a --judge_url http://a", ["reward.two_judges", "reward.judge_model"]),
    ],
)
@pytest.mark.parametrize("command", ["rl", "eval"])
def test_one_judge_answers_and_a_server_is_told_which(words: str, codes: list[str], command: str) -> None:
    found: list[str] = []
    try:
        resolve(command, ["--pretrain", "m", *words.split()])
    except SettingsError as error:
        found = [problem.code for problem in error.problems]
    assert found == codes


@pytest.mark.parametrize(
    ("words", "code", "do"),
    [
        ("--reward regex", "reward.rule_needs", "--response_pattern boxed"),
        ("--reward_routes a=length", "reward.rule_needs", "--length_range 10 200"),
        ("--reward math,language", "reward.rule_needs", "--response_language en"),
        ("--number_tolerance 1", "reward.no_rule", "--reward numeric"),
        ("--reward math --format_tags a", "reward.no_rule", "--reward math,format"),
        ("--reward_source_key kind", "reward.no_rule", "leave reward_source_key out"),
        ("--reward math,exact,math", "reward.twice", "--reward math,exact"),
        ("--reward math,exact --reward_routes a=math", "reward.twice", "--reward exact"),
        ("--reward regex --response_pattern a --length_slack 0", "", ""),
        ("--reward format --reward_routes a=numeric+regex,*=math --number_tolerance 1 --response_pattern a", "", ""),
    ],
)
@pytest.mark.parametrize("command", ["rl", "eval"])
def test_a_rule_has_what_it_needs_and_no_setting_is_without_its_rule(
    words: str, code: str, do: str, command: str
) -> None:
    found: list[tuple[str, str]] = []
    try:
        resolve(command, ["--pretrain", "m", *words.split()])
    except SettingsError as error:
        found = [(problem.code, problem.do) for problem in error.problems]
    assert found == ([(code, do)] if code else [])


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        ("--reward_wait 3600", []),
        ("--remote_rm_url http://a --reward_wait 3599", []),
        ("--remote_rm_url http://a --reward_wait 3600", ["reward.wait_too_long"]),
        ("--judge_url http://a --judge_model m --reward_wait 3600", ["reward.wait_too_long"]),
        ("--remote_rm_url http://a --reward_wait 3600 --watchdog_seconds 0", []),
    ],
)
def test_a_wait_is_shorter_than_the_patience_of_the_watchdog(words: str, codes: list[str]) -> None:
    found: list[str] = []
    try:
        resolve("rl", ["--pretrain", "m", "--prompt_data", "d", *words.split()])
    except SettingsError as error:
        found = [problem.code for problem in error.problems]
    assert found == codes


@pytest.mark.parametrize(
    ("given", "do"),
    [
        ("{file}", "--reward {file}:my_reward"),
        ("{file}:other", "--reward {file}:other"),
        ("http://localhost:8000/score,{file}", "--reward {file}:my_reward"),
        ("nowhere.py", "--reward nowhere.py:reward_func"),
    ],
)
def test_a_file_in_the_place_of_a_server_is_answered_with_its_function(given: str, do: str, tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text("def helper(x):\n    return x\n\ndef my_reward(responses, labels):\n    return [1.0]\n")
    words = ["--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", given.format(file=file)]
    with pytest.raises(SettingsError) as caught:
        resolve("rl", words)
    (problem,) = caught.value.problems
    assert (problem.code, problem.do) == ("reward.url_is_file", do.format(file=file))


def test_a_server_whose_path_ends_as_a_file_is_a_server() -> None:
    url = "http://localhost:8000/score.py"
    found = resolve("rl", ["--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", url])
    assert found.settings.reward_models.remote_rm_url == url
