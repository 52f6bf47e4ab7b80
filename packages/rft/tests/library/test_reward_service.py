"""`rft.serve_reward`: a server of rewards from Python."""

from __future__ import annotations

import pytest

import rft
from rft.config.errors import SettingsError
from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.servers.http_client import Endpoint
from rft_trainer.rewards.servers.remote_reward_model import RemoteReward


def vowels(response: str) -> float:
    """The number of vowels."""
    return float(sum(letter in "aeiou" for letter in response))


def test_a_function_is_asked_over_http_until_the_server_is_closed() -> None:
    with rft.serve_reward(vowels, port=0) as server:
        remote = RemoteReward("far", Endpoint(server.url, 20.0, 0))
        scores = remote([RewardItem("p", "q", text, None, "stop", 1) for text in ("aeon", "x")])
    assert [score.value for score in scores] == [3.0, 0.0]
    assert server.counters.responses == 2
    [score] = remote([RewardItem("p", "q", "a", None, "stop", 1)])
    assert score.value is None


def test_settings_are_checked_as_on_the_command_line() -> None:
    with pytest.raises(SettingsError, match="port"):
        rft.serve_reward(vowels, prot=0)  # pyright: ignore[reportCallIssue]
