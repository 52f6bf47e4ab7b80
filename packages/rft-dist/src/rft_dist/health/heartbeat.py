"""Heartbeat: the status that each rank publishes about every second, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rft_dist.health.activity import Call

FINISHED = "finished"
"""`ended` of a rank that left in order."""

STOPPING = "stopping"
"""`ended` of a rank that knows of a failure and is on its way out."""


@dataclass(frozen=True, slots=True)
class Status:
    """Status of one rank. Ages are seconds at the moment of the heartbeat, by the clock of that rank."""

    rank: int
    host: str
    machine: str
    """Equal for processes that see one another's process numbers (`process_state.this_machine`)."""
    pid: int
    beat: int
    """Counts heartbeats."""
    phase: str
    phase_seconds: float
    step: int
    steps_done: int
    call: Call | None
    """The last collective that it entered."""
    inside: bool
    """Whether that has not finished yet."""
    call_seconds: float
    idle_seconds: float
    """Since a phase, a collective or a library's collective last began or ended."""
    library_calls: int
    """Collectives of all process groups, those that libraries issue included."""
    stack: tuple[str, ...] = field(default=())
    """Lines of its main thread, innermost first."""
    ended: str = ""
    """Empty while it runs."""

    @property
    def who(self) -> str:
        """Text by which messages name the rank."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def number(self) -> int:
        """Number of the last collective that the rank entered; 0 before the first."""
        return self.call.number if self.call else 0

    def encode(self) -> str:
        """Return the status as one JSON object."""
        return json.dumps(asdict(self), separators=(",", ":"))


def decode(text: str | bytes) -> Status:
    """Restore a status from the JSON of `Status.encode`."""
    row: dict[str, Any] = json.loads(text)
    call = row.pop("call")
    known = Call(**(call | {"shape": tuple(call["shape"])})) if call else None
    return Status(**(row | {"call": known, "stack": tuple(row["stack"])}))


@dataclass(frozen=True, slots=True)
class LastSeen:
    """A status and when this process first read that heartbeat, by its own clock."""

    status: Status
    at: float

    def idle(self, now: float) -> float:
        """Seconds without progress, the time since the heartbeat included."""
        return self.status.idle_seconds + max(0.0, now - self.at)


def no_heartbeat_yet(rank: int) -> Status:
    """Return the status of a rank whose first heartbeat has not come."""
    return Status(rank, "host unknown", "", 0, 0, "start", 0.0, 0, 0, None, False, 0.0, 0.0, 0)
