"""Ranks of a command that trains several times: one launcher starts them for all stages. No torch is imported here."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rft.process.detached import run_has_begun
from rft.process.launching import started_ranks
from rft_dist.launch.environment import ranks_from_environment, start_seconds, take_next_port

_MEETINGS = 4
"""Each stage forms a group of its own: a warm-up, supervised training instead, and two evaluations behind it."""
_POLL_SECONDS = 0.02


def is_started_rank() -> bool:
    """Return True in a process that a launcher has started as one of several ranks."""
    return ranks_from_environment().world_size > 1


def is_first() -> bool:
    """Return True in the process that makes the files and prints."""
    return ranks_from_environment().rank == 0


def started(words: Sequence[str], nproc: int, logs: Path) -> int | None:
    """Run the command as `nproc` ranks and give their exit code; None where one process is enough."""
    if nproc < 2:
        return None
    code = started_ranks([sys.executable, "-m", "rft_cli.main", *words], nproc, logs, meetings=_MEETINGS)
    run_has_begun()  # and has ended: a further signal must not change the exit code
    return code


def meet_anew() -> None:
    """Have the next stage meet at a port of its own."""
    take_next_port(os.environ)


def wait_for(file: Path) -> None:
    """Return when the first rank has written `file`, or when it has taken too long: the meeting then names it."""
    end = time.monotonic() + start_seconds(os.environ)
    while not file.exists() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
