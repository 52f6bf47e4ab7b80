"""Settings of reward models, servers and judges: which contradict one another, and which nothing reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rft.reward_kinds import reward_flags
from rft_cli.config.errors import SettingsError
from rft_cli.config.resolve import resolve
from rft_cli.config.rules.rewards import idle_reward_settings

MODEL = ["reward_offload", "reward_batch_tokens"]
SERVERS = ["remote_rm_timeout", "remote_rm_concurrency", "remote_rm_retries"]
JUDGE = ["judge_template", "task_instruction", "judge_pattern", "judge_range", "judge_max_new_tokens"]
BATCH, NAME, FUNCTION = "remote_rm_batch_size", "judge_model", ["reward_workers", "reward_timeout"]


def idle(**given: Any) -> list[str]:
    names = {*reward_flags(), "reward", "reward_pretrain", "remote_rm_url", "judge_url", "judge_pretrain"}
    values: Mapping[str, Any] = dict.fromkeys(names, "") | given
    return [name for name, _ in idle_reward_settings(values)]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, [*MODEL, BATCH, *SERVERS, NAME, *JUDGE]),
        ({"reward": "exact"}, [*MODEL, BATCH, *SERVERS, NAME, *JUDGE]),
        ({"reward_pretrain": "a"}, [BATCH, *SERVERS, NAME, *JUDGE, *FUNCTION]),
        ({"reward_pretrain": "a", "reward": "exact"}, [BATCH, *SERVERS, NAME, *JUDGE]),
        ({"remote_rm_url": "a"}, [*MODEL, NAME, *JUDGE, *FUNCTION]),
        ({"judge_url": "a"}, [*MODEL, BATCH, *FUNCTION]),
        ({"judge_pretrain": "a"}, [*MODEL, BATCH, *SERVERS, NAME, *FUNCTION]),
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
