"""Diagnosis: find the rank that keeps the others waiting from all heartbeats, without threads, clocks or store."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from rft_dist.health import failure as kinds
from rft_dist.health.failure import Cause
from rft_dist.health.heartbeat import LastSeen, Status
from rft_dist.health.process_state import ALIVE, GONE, STOPPED

_STACK_SHOWN = 5
_FRESH_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Seconds; 0 = no limit."""

    silence: float
    """Without a heartbeat, for a rank of another machine."""
    phase: float
    """Without progress in a phase, once this rank has ended a step."""
    first: float
    """The same before its first step has ended."""
    collective: float
    """Inside a collective that every rank has entered."""

    def of(self, status: Status) -> float:
        """Return the seconds that a rank may go without progress outside of a collective."""
        return self.phase if status.steps_done else self.first


def of_neighbours(states: Mapping[int, tuple[str, float]], seen: Mapping[int, LastSeen], now: float) -> Cause | None:
    """Return the cause where the process of a rank on this machine has ended or is stopped.

    `states` gives rank -> (state, since when it was seen so). A process that leaves in order may be gone
    before its last heartbeat is read, and a process may be stopped briefly: both are reported only after the seconds
    of `_GONE_PATIENCE` and `_STOPPED_PATIENCE`.
    """
    for rank, (state, since) in sorted(states.items()):
        patience = {GONE: _GONE_PATIENCE, STOPPED: _STOPPED_PATIENCE}.get(state)
        if patience is None or now - since < patience or seen[rank].status.ended:
            continue
        status = seen[rank].status
        if state == GONE:
            what, why = f"{status.who} is gone", "its process ended without an error message: killed, or out of memory"
        else:
            what, why = f"{status.who} is stopped", "its process was stopped from outside (SIGSTOP, a debugger)"
        kind = kinds.GONE if state == GONE else kinds.STOPPED
        return Cause(kind, rank, f"{what}; {_reached(status, seen)}", why, _where(status))
    return None


_GONE_PATIENCE = 1.0
_STOPPED_PATIENCE = 3.0


def of_all(
    seen: Mapping[int, LastSeen],
    limits: HealthLimits,
    now: float,
    *,
    world_size: int = 0,
    neighbours: Mapping[int, str] | None = None,
    compares_calls: bool = False,
) -> Cause | None:
    """The culprit among the ranks in `seen`, or None while everybody may still be working.

    `neighbours` gives the state of the process for ranks of this machine: such a rank may be silent, because
    something holds Python's lock for long, and is judged by `of_neighbours` and by its phase. `compares_calls`
    names ranks that are in different collectives under one number.
    """
    states = neighbours or {}
    # only a rank that is heard of can be late: an old heartbeat does not say what it did since
    fresh = {r: s for r, s in seen.items() if (states[r] == ALIVE if r in states else now - s.at < _FRESH_SECONDS)}
    return (
        # what makes others wait comes first: those that wait for a dead rank look late or stuck themselves
        _silent(seen, limits, now, states)
        or (_mismatch(seen) if compares_calls else None)
        or _left(seen, now)
        or _late(seen, fresh, limits, now)
        or (_stuck(seen, limits, now) if len(seen) >= world_size else None)
    )


def waiting_for(seen: Mapping[int, LastSeen], now: float, seconds: float) -> str:
    """One line naming whom others wait for since `seconds`; empty where nobody does."""
    front = _front(seen)
    waiters = [s for s in seen.values() if s.status.inside and s.status.number == front]
    behind = [s for s in seen.values() if s.status.number < front and not s.status.ended]
    if not waiters or not behind:
        return ""
    waited = max(waiter.status.call_seconds + now - waiter.at for waiter in waiters)
    if waited < seconds:
        return ""
    laggard = min(behind, key=lambda s: (s.status.number, s.status.rank))
    call = waiters[0].status.call
    assert call is not None
    ranks = ", ".join(str(waiter.status.rank) for waiter in waiters[:16])
    return (
        f"ranks {ranks} have waited {waited:.0f} s in collective {call.describe()} for {laggard.status.who}, "
        f"{_phase(laggard, now)}, {laggard.status.stack[0] if laggard.status.stack else 'no stack known'}"
    )


def _silent(seen: Mapping[int, LastSeen], limits: HealthLimits, now: float, known: Container[int]) -> Cause | None:
    for rank, each in sorted(seen.items()):
        silence = now - each.at
        if each.status.ended or rank in known or not limits.silence or silence <= limits.silence:
            continue
        what = f"{each.status.who} has sent no heartbeat for {silence:.0f} s; {_reached(each.status, seen)}"
        why = "its process is stopped or dead, or its machine is cut off; it was last seen " + _phase(each, each.at)
        return Cause(kinds.SILENT, rank, what, why, _where(each.status))
    return None


def _mismatch(seen: Mapping[int, LastSeen]) -> Cause | None:
    by_number: dict[int, Status] = {}
    for each in sorted(seen.values(), key=lambda s: s.status.rank):
        status = each.status
        if status.call is None:
            continue
        # only calls of one number are compared: ranks may be several collectives apart
        first = by_number.setdefault(status.number, status)
        assert first.call is not None
        if not first.call.matches(status.call):
            return mismatch(first.rank, first.call.describe(), status.rank, status.call.describe())
    return None


def mismatch(rank: int, call: str, other: int, other_call: str) -> Cause:
    """Two ranks whose collectives of one number are not the same."""
    return Cause(
        kinds.MISMATCH,
        other,
        f"rank {other} is in collective {other_call}, rank {rank} in {call}",
        "all ranks must run the same collectives in the same order, otherwise unrelated numbers are added up",
        f"{call.partition(' at ')[2]} and {other_call.partition(' at ')[2]}",
    )


def _left(seen: Mapping[int, LastSeen], now: float) -> Cause | None:
    """Return the cause where ranks wait in a collective that a rank which left in order will never enter."""
    front = _front(seen)
    waiters = [s for s in seen.values() if s.status.inside and s.status.number == front]
    for rank, each in sorted(seen.items()):
        if each.status.ended and each.status.number < front and waiters and now - each.at > _LEFT_PATIENCE:
            why = "that rank has finished and left the run: the others wait in a collective that it never enters"
            return Cause(
                kinds.LEFT, rank, f"{each.status.who} has left; {_reached(each.status, seen)}", why, _where(each.status)
            )
    return None


_LEFT_PATIENCE = 2.0


def _late(
    seen: Mapping[int, LastSeen], fresh: Mapping[int, LastSeen], limits: HealthLimits, now: float
) -> Cause | None:
    """Return the rank that is outside of any collective without progress for too long, of those in `fresh`."""
    late: list[tuple[int, int, float, float, LastSeen]] = []
    for rank, each in fresh.items():
        limit, idle = limits.of(each.status), each.idle(now)
        if limit and idle > limit and not each.status.inside and not each.status.ended:
            late.append((each.status.library_calls, rank, idle, limit, each))
    if not late:
        return None
    _, rank, idle, limit, each = min(late, key=lambda entry: entry[:2])  # inside libraries the one with fewest calls
    what = f"{each.status.who} has been {_phase(each, now)}, without progress for {idle:.0f} s"
    if _front(seen) > each.status.number:
        what += f"; {_reached(each.status, seen)}"
    flag = "--watchdog_seconds" if each.status.steps_done else "--watchdog_first_seconds"
    return Cause(kinds.LATE, rank, what, f"at most {limit:g} s are allowed ({flag})", _where(each.status))


def _stuck(seen: Mapping[int, LastSeen], limits: HealthLimits, now: float) -> Cause | None:
    """Return the cause where all ranks are in the same collective and it does not end."""
    statuses = [each.status for each in seen.values()]
    if not limits.collective or not all(status.inside for status in statuses):
        return None
    shortest = min(each.status.call_seconds + now - each.at for each in seen.values())
    if len({status.number for status in statuses}) != 1 or shortest <= limits.collective:
        return None
    first = statuses[0]
    assert first.call is not None
    what = f"all {len(statuses)} ranks have been in collective {first.call.describe()} for {shortest:.0f} s"
    why = (
        f"at most {limits.collective:g} s are allowed (--watchdog_collective_seconds): look at the network between them"
    )
    return Cause(kinds.STUCK, -1, what, why, first.call.site)


def _front(seen: Mapping[int, LastSeen]) -> int:
    """Number of the newest collective that anybody waits in; 0 where nobody does."""
    return max((s.status.number for s in seen.values() if s.status.inside), default=0)


def _reached(status: Status, seen: Mapping[int, LastSeen]) -> str:
    """Describe the collective of the other ranks that this rank did not reach."""
    front = _front({rank: each for rank, each in seen.items() if rank != status.rank})
    waiting = [s.status for s in seen.values() if s.status.inside and s.status.number == front]
    if not waiting or front < status.number or (front == status.number and not status.inside):
        last = status.call.describe() if status.call else "none"
        return f"its last collective is {last}{' (not finished)' if status.inside else ''}"
    call = waiting[0].call
    assert call is not None
    if front == status.number:
        return f"it is in collective {call.describe()}, as are ranks {_ranks(waiting)}"
    return f"it did not reach collective {call.describe()}, in which ranks {_ranks(waiting)} wait"


def _ranks(statuses: Sequence[Status]) -> str:
    shown = ", ".join(str(status.rank) for status in statuses[:16])
    return shown + (f" and {len(statuses) - 16} more" if len(statuses) > 16 else "")


def _phase(each: LastSeen, now: float) -> str:
    status = each.status
    return f"in phase {status.phase} of step {status.step} for {status.phase_seconds + max(0.0, now - each.at):.0f} s"


def _where(status: Status) -> str:
    return "; ".join(status.stack[:_STACK_SHOWN]) or "no stack known"
