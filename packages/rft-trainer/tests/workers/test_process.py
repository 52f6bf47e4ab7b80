"""One scoring process as its pool sees it: how it is started, its deadlines, its lines and its end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rft_core.child_process import ChildProcess
from rft_trainer.workers.limits import ProcessLimits
from rft_trainer.workers.process import ScoringProcess


class Started:
    """What was asked of the child process that is not started."""

    def __init__(self) -> None:
        self.command: list[str] = []
        self.environment: dict[str, str] = {}
        self.inherited: dict[str, str] = {}
        self.longest_line = 0
        self.output: Any = None
        self.sent: list[Any] = []
        self.graces: list[float] = []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """No process; it is 100 s, or what `clock` says."""
    found = Started()

    def start(
        self: Any,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        longest_line: int,
        inherited: Mapping[str, str],
        output: Any,
    ) -> None:
        found.command, found.environment, found.longest_line = list(command), dict(environment), longest_line
        found.inherited, found.output = dict(inherited), output
        self.lines, self.has_ended = deque(), False

    def kill(self: object, grace: float) -> str:
        found.graces.append(grace)
        return "was killed"

    monkeypatch.setattr(ChildProcess, "__init__", start)
    monkeypatch.setattr(ChildProcess, "send", lambda self, line: found.sent.append(json.loads(line)))
    monkeypatch.setattr(ChildProcess, "kill", kill)
    clock(monkeypatch, 100.0)
    return found


def clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: seconds)


def test_a_process_is_a_program_of_its_own_whose_scores_are_the_same_each_time(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"HF_TOKEN": "a", "MY_SECRET": "b", "PATH": "c"})
    ScoringProcess("file:a.py:reward_fn", ProcessLimits(123, 456, ("HF_*",)), 5.0, list[bytes]().append)
    assert started.output is not None
    assert started.command == [
        sys.executable,
        "-P",  # a file of the working directory does not stand in for a library
        "-m",
        "rft_trainer.workers.main",
        "file:a.py:reward_fn",
        "123",
        "456",
    ]
    assert started.environment == {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    assert started.inherited == {"HF_TOKEN": "a", "PATH": "c"}
    assert started.longest_line == 16 * 2**20


def test_a_start_and_each_job_have_a_deadline_and_between_them_there_is_none(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = ScoringProcess("math", ProcessLimits(), 5.0)
    assert (process.is_ready, process.job_id, process.seconds_allowed, process.deadline) == (False, None, 5.0, 105.0)
    assert not process.is_late
    for now, late in ((104.9, False), (105.0, True), (105.1, True)):
        clock(monkeypatch, now)
        assert process.is_late is late
    process.become_ready()
    assert (process.is_ready, process.is_late, process.deadline) == (True, False, None)
    process.begin(4, {"labels": [None]}, 2.5)
    assert (process.job_id, process.seconds_allowed, process.deadline) == (4, 2.5, 105.1 + 2.5)
    # the child ends itself after the pool would have done so
    assert started.sent == [{"id": 4, "alarm": 3.5, "payload": {"labels": [None]}}]
    with pytest.raises(AssertionError):
        process.begin(5, {}, 1.0)
    process.finish()
    assert (process.job_id, process.deadline, process.is_ready) == (None, None, True)


def test_lines_are_taken_once_and_those_that_are_no_message_say_nothing(started: Started) -> None:
    process = ScoringProcess("math", ProcessLimits(), 5.0)
    process.lines.extend(map(bytearray, (b'{"ready": true}', b"noise", b"[1]", b"\xff", b'{"id": 1}')))
    assert process.take_messages() == [{"ready": True}, {}, {}, {}, {"id": 1}]
    assert process.take_messages() == []


def test_a_process_that_is_ending_may_say_how_and_another_is_killed_at_once(started: Started) -> None:
    process = ScoringProcess("math", ProcessLimits(), 5.0)
    assert process.discard() == "was killed"
    process.has_ended = True
    process.discard()
    assert started.graces == [0.0, 1.0]
