"""The page that every rank prints when the run ends for a reason of another one."""

from __future__ import annotations

from collections.abc import Mapping

from rft_core.terminal_text import bounded
from rft_dist.health.failure import Cause
from rft_dist.health.heartbeat import LastSeen

_SHOWN = 64
_STACK_LINES = 8


def page(cause: Cause, seen: Mapping[int, LastSeen], now: float) -> str:
    """The cause, one line a rank (at most 64), and the stack of the rank at fault."""
    lines = [f"the run ends: {bounded(cause.what)}", f"  why    {bounded(cause.why)}"]
    if cause.where:
        lines.append(f"  where  {bounded(cause.where)}")
    rows = [_HEADER, *(_row(each, now) for _, each in _chosen(cause, seen))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(seen) > _SHOWN:
        lines.append(f"  and {len(seen) - _SHOWN} more ranks")
    lines += _stack(cause, seen)
    return "\n".join(lines) + "\n"


_HEADER = ("rank", "host", "pid", "heard", "step", "phase", "last collective", "is", "idle")


def _chosen(cause: Cause, seen: Mapping[int, LastSeen]) -> list[tuple[int, LastSeen]]:
    """The rank at fault is among those shown."""
    return sorted(sorted(seen.items(), key=lambda entry: (entry[0] != cause.rank, entry[0]))[:_SHOWN])


def _row(each: LastSeen, now: float) -> tuple[str, ...]:
    status = each.status
    state = status.ended or ("inside" if status.inside else "done" if status.call else "")
    return (
        str(status.rank),
        status.host,
        str(status.pid),
        f"{max(0.0, now - each.at):.1f} s ago",
        str(status.step),
        f"{status.phase} {status.phase_seconds:.0f} s",
        status.call.describe() if status.call else "none",
        state,
        f"{each.idle(now):.0f} s",
    )


def _stack(cause: Cause, seen: Mapping[int, LastSeen]) -> list[str]:
    if cause.error.get("traceback"):
        return [f"  error of rank {cause.rank}:", *(f"    {line}" for line in cause.error["traceback"])]
    if cause.rank in seen and seen[cause.rank].status.stack:
        lines = seen[cause.rank].status.stack[:_STACK_LINES]
        return [f"  rank {cause.rank} was last at, innermost first:", *(f"    {line}" for line in lines)]
    return []
