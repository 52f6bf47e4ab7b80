"""Signals that ask a run to stop, and the vote of the ranks about it."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft_trainer.runs.stop_signals import AlarmStop, StopSignals, agree, agreed_alarm
from rft_trainer.testing.bigram import OneRank

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.mark.parametrize("number", ASKING)
def test_a_signal_is_noted_by_its_name_and_the_handlers_of_before_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in ASKING]
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number.name
    assert [signal.getsignal(each) for each in ASKING] == before


def test_a_second_interrupt_stops_at_once_and_no_other_signal_does() -> None:
    with StopSignals() as signals:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert signals.received == "SIGUSR1"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_first_interrupt_is_answered_on_the_terminal_and_no_other_signal_is(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        assert "Ctrl-C again" in capfd.readouterr().err
    with StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == ""


def test_a_vote_counts_where_any_rank_votes_for_it() -> None:
    assert agree(OneRank(), True, False) == (True, False)
    seen: list[list[float]] = []

    def largest(own: torch.Tensor) -> torch.Tensor:
        seen.append(own.tolist())
        return torch.maximum(own, torch.tensor([0.0, 1.0, 0.0]))

    ranks: Any = SimpleNamespace(world_size=2, max=largest)
    assert agree(ranks, True, False, False) == (True, True, False)
    assert seen == [[1.0, 0.0, 0.0]], "all votes in one exchange"


def test_every_rank_gets_the_alarm_of_the_first() -> None:
    alarm, signals = AlarmStop("never_ends: all cut", "--generate_max_len 8", pauses=False), StopSignals()
    assert agreed_alarm(signals, OneRank()) is None
    signals.alarm = alarm
    assert agreed_alarm(signals, OneRank()) == alarm
    own = json.dumps(asdict(alarm)).encode()

    def gathers(first: bytes) -> Any:
        return SimpleNamespace(world_size=2, gather_bytes=lambda sent: [first, sent])

    assert agreed_alarm(StopSignals(), gathers(own)) == alarm
    assert agreed_alarm(signals, gathers(b"null")) is None
