"""Reward on the plan page: where it runs, and how long a response or a comparison may take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rft_cli.config.resolve import resolve
from rft_cli.pages.run_plan_rewards import reward_lines


@pytest.mark.parametrize(
    ("reward", "line"),
    [
        ("", "exact, called in this process, without a limit of time"),
        ("in-process:score", "score, called in this process, without a limit of time"),
        ("math", "math, called in this process, algebra in 2 processes, 3 s a comparison"),
        ("code", "code (code_seconds = 5, code_memory = 0.5), 2 sandboxes at once"),
        ("own.py:score", "own.py:score, 2 processes, 3 s a response"),
    ],
)
def test_processes_and_a_limit_of_time_are_named_where_there_are_any(reward: str, line: str) -> None:
    settings = resolve("rl", ["--pretrain", "m", "--device", "cpu"]).settings
    chosen = replace(settings.reward, reward=reward, reward_workers=2, reward_timeout=3.0)
    assert reward_lines(replace(settings, reward=chosen)) == [line]
