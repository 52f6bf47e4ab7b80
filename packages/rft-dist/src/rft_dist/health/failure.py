"""Cause of failure of a run: one record, the same on all ranks; the first one published is kept."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rft_core.errors import PeerError, RftError

FAILURE = "failure"
"""A rank raised an error; the other kinds are what the others saw of it."""
GONE = "gone"
STOPPED = "stopped"
SILENT = "silent"
STORE = "store"
MISMATCH = "mismatch"
LEFT = "left"
LATE = "late"
STUCK = "stuck"

_LINES_KEPT = 60


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of the end of a run.

    Example: `Cause("gone", 1, "rank 1 (node-b, pid 412) is gone", why="its process ended without ...")`.
    """

    kind: str
    rank: int
    """Whose fault it is; of two ranks that differ, the first that is not rank 0."""
    what: str
    why: str
    where: str = ""
    told_by: int = -1
    """The rank that noticed."""
    error: dict[str, Any] = field(default_factory=dict)
    """Of a failure: rank, host, pid, step, phase, type, code, message, at, traceback."""

    def encode(self) -> str:
        """Return the cause as one JSON object."""
        return json.dumps(asdict(self), ensure_ascii=False)

    def as_error(self, *, own: str, do: str) -> PeerError:
        """Return the error for a rank that ends because of this cause; `own` describes its own activity."""
        return PeerError(
            code=f"peer.{self.kind}",
            what=self.what,
            where=self.where or own,
            why=self.why,
            state=f"this step is lost, the last checkpoint is untouched; {own}"
            if self.where
            else "this step is lost, the last checkpoint is untouched",
            do=do,
        )


def decode(text: str | bytes) -> Cause:
    """Restore a cause from the JSON of `Cause.encode`."""
    return Cause(**json.loads(text))


def failure(
    error: BaseException, *, rank: int, host: str, pid: int, step: int, phase: str, scrub: Callable[[str], str]
) -> Cause:
    """The record of an error of this rank; `scrub` takes secrets out of text."""
    problem = error.problem if isinstance(error, RftError) else None
    message = problem.what if problem else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:500]}"
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else "unknown"
    lines = scrub("".join(traceback.format_exception(error))).splitlines()
    details = {
        "rank": rank,
        "host": host,
        "pid": pid,
        "step": step,
        "phase": phase,
        "type": type(error).__name__,
        "code": problem.code if problem else "program.unexpected",
        "message": scrub(str(error)),
        "at": at,
        "traceback": lines[-_LINES_KEPT:],
    }
    if problem is not None and problem.code == f"collective.{MISMATCH}":
        return Cause(MISMATCH, rank, problem.what, problem.why, problem.where, rank, details)
    what = f"rank {rank} ({host}, pid {pid}) failed at step {step}, phase {phase}: {scrub(message)}"
    return Cause(FAILURE, rank, what, "one rank cannot go on without the others", at, rank, details)
