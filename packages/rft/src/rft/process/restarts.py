"""Restarts of a scheduler's job that lead to no newer checkpoint: after three of them in a row the job ends.

A job that is requeued whenever it ends would do the same steps again for ever, where something ends it before its next
save. What a person starts is never counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rft_core.durable_files import replace_text
from rft_core.errors import NoProgressError

FILE = "restarts.json"
MOST = 3
"""Restarts in a row from one checkpoint, after each of which the next finds the same one."""
_SCHEDULERS = (("SLURM_RESTART_COUNT", "SLURM_JOB_ID"), ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"))
"""(number of the restart, name of the job) as schedulers say it."""


class Broadcast(Protocol):
    """The ranks of the run."""

    def broadcast_bytes(self, data: bytes | None) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart of a job."""

    job: str
    variable: str
    number: int


def restart_of(environment: Mapping[str, str]) -> Restart | None:
    """Return which restart of which job this is; None where a person, or a job for the first time, starts the run."""
    for count, job in _SCHEDULERS:
        text = environment.get(count, "")
        if text.isdecimal() and int(text) > 0:
            return Restart(environment.get(job, ""), count, int(text))
    return None


def end_without_progress(
    path: Path, step: int | None, environment: Mapping[str, str], ranks: Broadcast, *, is_first: bool
) -> None:
    """Note that a restart continues the run in `path` from `step`, and end it where three before came no further.

    Args:
        path: the run's directory.
        step: of the checkpoint that the run continues from; None: it begins again.
        environment: of this process, the same in all ranks as far as the scheduler sets it.
        ranks: all of them call this where the scheduler says that it is a restart.
        is_first: whether this is rank 0, which reads and writes the note.

    Raises:
        NoProgressError: on every rank.
    """
    restart = restart_of(environment)
    if restart is None:
        return
    stuck = b""
    if is_first:
        steps = [*_noted(path, restart.job), step][-(MOST + 1) :]
        replace_text(path / FILE, json.dumps({"job": restart.job, "steps": steps}) + "\n")
        stuck = b"1" if len(steps) > MOST and len(set(steps)) == 1 else b"0"
    if ranks.broadcast_bytes(stuck if is_first else None) != b"1":
        return
    began = "its start" if step is None else f"step {step}"
    raise NoProgressError(
        code="run.no_progress",
        what=f"job {restart.job} was started again {MOST} times from {began} and came to no newer checkpoint",
        where=f"{path / 'checkpoints'}, {restart.variable} = {restart.number}",
        why="each start did the same steps again and ended before the next save, and so would this one",
        state=f"nothing was started; the run in {path} is as it was",
        do=f"rft-train resume {path} --save_steps 1, once what ends it is gone: its last lines are in {path / 'logs'}",
    )


def _noted(path: Path, job: str) -> list[int | None]:
    """Return the steps from which this job began before; none of another job, or where the note cannot be read."""
    try:
        noted = json.loads((path / FILE).read_text(encoding="utf-8"))
        return list(noted["steps"]) if noted["job"] == job else []
    except (OSError, ValueError, KeyError, TypeError):
        return []
