"""A profile of a run that goes on: who records it, or why nobody would. No torch is imported here."""

from __future__ import annotations

import shlex
from pathlib import Path

from rft.process.stack_dumps import RankProcess, last_process
from rft_core.errors import DataError
from rft_dist.health.process_state import this_machine
from rft_trainer.sinks.profile.asked import ask
from rft_trainer.sinks.profile.steps import MOST

DEFAULT_STEPS = 3


def request_profile(run: Path, number: int = DEFAULT_STEPS) -> RankProcess:
    """Let rank 0 of a run record its next steps, and return its process.

    It takes the request at the end of the step in which it is, also on another machine that shares the folder.

    Args:
        run: directory of the run.
        number: steps to record.

    Raises:
        DataError: nobody trains there, or it cannot be so many steps.
        StorageError: the request cannot be written.
    """
    show = f"rft-train runs show {shlex.quote(str(run))}"
    if not 1 <= number <= MOST:
        raise DataError(
            code="run.profile_steps",
            what=f"a profile of {number} steps was asked for",
            where="--steps",
            why=f"a trace holds every operation of its steps: 1 to {MOST} of them",
            state="nothing was changed",
            do=f"rft-train runs profile {shlex.quote(str(run))} --steps {min(max(number, 1), MOST)}",
        )
    file = run / "logs" / "stacks_rank_0.txt"
    process = last_process(file) if file.is_file() else None
    if process is None or (process.machine == this_machine() and not process.is_alive):
        gone = f"its process {process.pid} is gone" if process else "it has ended, or its first phase has not begun"
        raise DataError(
            code="run.no_profile",
            what=f"no rank of {run} can be profiled",
            where=str(file),
            why=gone,
            state="nothing was changed",
            do=show,
        )
    ask(run, number)
    return process
