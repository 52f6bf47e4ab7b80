"""The endpoint of a server from its settings: its deadline, and the wait that a signal ends."""

from __future__ import annotations

import signal

import pytest

from rft.build.reward_parts import waiting_endpoint
from rft_core.errors import OutageError
from rft_trainer.rewards.servers.server_wait import ServerWait, StillAway
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.settings.rewards import RewardModelSettings


def wait_of(settings: RewardModelSettings) -> ServerWait:
    wait = waiting_endpoint(settings, "http://h", "the server", "--flag").wait
    assert wait is not None
    return wait


def test_time_and_retries_are_those_of_the_settings() -> None:
    endpoint = waiting_endpoint(RewardModelSettings(remote_rm_timeout=3.0, remote_rm_retries=7), "http://h", "s", "w")
    assert (endpoint.url, endpoint.seconds, endpoint.retries) == ("http://h", 3.0, 7)


def test_the_end_of_the_wait_is_as_set() -> None:
    with pytest.raises(OutageError):
        wait_of(RewardModelSettings(reward_wait=0.0)).pause("refused", 0)
    with pytest.raises(StillAway):
        wait_of(RewardModelSettings(reward_wait=0.0, on_reward_outage="unscored")).pause("refused", 0)


def test_a_signal_to_the_run_ends_the_wait() -> None:
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(OutageError) as caught:
            wait_of(RewardModelSettings(reward_wait=60.0)).pause("refused", 0)
    assert caught.value.problem.code == "reward.wait_interrupted"
