"""One scoring process: a child that is given one job at a time, each with its deadline."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rft_core import fault_points
from rft_core.child_process import ChildProcess
from rft_core.secrets import without_secrets
from rft_trainer.workers.limits import ProcessLimits

_START = fault_points.declare("reward.start", "a scoring process is about to be started")

_ALARM_GRACE = 1.0
_EXIT_GRACE = 1.0
_MAX_REPLY = 1 << 24


class ScoringProcess(ChildProcess):
    """A child that runs `rft_trainer.workers.main`, from start to kill."""

    def __init__(
        self,
        task: str,
        limits: ProcessLimits,
        start_seconds: float,
        output: Callable[[bytes], None] | None = None,
    ) -> None:
        fault_points.fault_point(_START)
        # -P: a file named math.py or json.py in the working directory must not stand in for the library
        sizes = [str(limits.address_bytes), str(limits.data_bytes)]
        command = [sys.executable, "-P", "-m", "rft_trainer.workers.main", task, *sizes]
        super().__init__(
            command,
            # sympy orders sets by hash: a fixed seed gives the same scores in every process
            {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            longest_line=_MAX_REPLY,
            inherited=without_secrets(os.environ, limits.variables),
            output=output,
        )
        self.is_ready = False
        self.job_id: int | None = None
        self.seconds_allowed = start_seconds
        self.deadline: float | None = time.monotonic() + start_seconds

    @property
    def is_late(self) -> bool:
        """Return whether start or job have taken longer than allowed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def become_ready(self) -> None:
        """Mark the task as loaded; there is no deadline until the first job."""
        self.is_ready, self.deadline = True, None

    def begin(self, job_id: int, payload: Mapping[str, object], seconds: float) -> None:
        """Queue a job; it is sent as fast as the child reads."""
        assert self.job_id is None, f"job {self.job_id} is not finished"
        self.job_id, self.seconds_allowed, self.deadline = job_id, seconds, time.monotonic() + seconds
        # the alarm is a second later than the deadline, so that the pool's kill comes first and is reported
        self.send(json.dumps({"id": job_id, "alarm": seconds + _ALARM_GRACE, "payload": dict(payload)}).encode())

    def finish(self) -> None:
        """Mark the job as finished, after its reply."""
        self.job_id = self.deadline = None

    def take_messages(self) -> list[Mapping[str, Any]]:
        """Return the replies that have arrived since the last call."""
        messages = [_parse(line) for line in self.lines]
        self.lines.clear()
        return messages

    def discard(self) -> str:
        """Kill the process, and return how it ended: one whose pipe is closed is on its way out and may say so."""
        return self.kill(_EXIT_GRACE if self.has_ended else 0.0)


def _parse(line: bytearray) -> Mapping[str, Any]:
    """Parse a reply; empty where the line is not one."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
