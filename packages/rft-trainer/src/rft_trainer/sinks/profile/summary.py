"""Summary of a profile: phases, operations, host reads and what bounds the speed, as a record and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rft_trainer.metrics.phase_timer import Phase
from rft_trainer.runs.bottleneck import Row, verdict_of_rows
from rft_trainer.sinks.profile.host_reads import ReadPlace
from rft_trainer.sinks.profile.steps import ProfiledSteps
from rft_trainer.sinks.profile.trace import TraceSums

_OTHER = "other"
_OPERATIONS, _PLACES = 15, 12
"""Lines of the page; the record has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """Records of some steps of a run, on its first rank."""

    run: str
    command: str
    device: str
    world_size: int
    steps: ProfiledSteps
    rows: Sequence[Row]
    """Rows of metrics of these steps, without the seconds in which recording began."""
    rows_before: Sequence[Row]
    """Rows of steps before these, the first left out."""
    sums: TraceSums
    reads: Sequence[ReadPlace]
    how_read: str
    """What was counted as a read; empty where none was."""
    why_unread: str = ""
    trace: str = ""
    """Name of the file of the trace."""


def record_of(profiled: Profiled) -> dict[str, Any]:
    """Return the summary as plain JSON; seconds, calls and reads are those of one step, on average."""
    number, rows = len(profiled.rows), profiled.rows
    seconds = sum(row["time/step"] for row in rows)
    spent = {str(name): sum(row.get(f"time/{name}") or 0.0 for row in rows) for name in (*Phase, _OTHER)}
    bound = verdict_of_rows(rows, profiled.command)
    device = profiled.sums.device
    return {
        "run": profiled.run,
        "command": profiled.command,
        "device": profiled.device,
        "rank": 0,
        "world_size": profiled.world_size,
        "steps": [profiled.steps.first, profiled.steps.last],
        "num_steps": number,
        "seconds_a_step": seconds / number,
        "seconds_a_step_before": median(row["time/step"] for row in profiled.rows_before)
        if profiled.rows_before
        else None,
        "phases": [
            {
                "name": name,
                "seconds": value / number,
                "share": value / seconds if seconds else 0.0,
                "outside_of_torch": profiled.sums.outside_seconds.get(name, 0.0) / number,
            }
            for name, value in sorted(spent.items(), key=lambda item: -item[1])
            if value > 0
        ],
        "operations": [
            {
                "name": each.name,
                "phase": each.phase,
                "calls": each.calls / number,
                "host_seconds": each.host_seconds / number,
                "device_seconds": each.device_seconds / number,
            }
            for each in profiled.sums.operations
        ],
        "gpu": None
        if device is None
        else {
            "busy_share": device.busy_seconds / seconds if seconds else 0.0,
            "kernels": device.num_kernels / number,
            "host_waits_seconds": device.host_waits_seconds / number,
        },
        "host_reads": {
            "counted": profiled.how_read,
            "why_not": profiled.why_unread,
            "a_step": sum(place.count for place in profiled.reads) / number if profiled.how_read else None,
            "places": [asdict(place) | {"count": place.count / number} for place in profiled.reads],
        },
        "bound": bound.as_record() if bound else None,
        "trace": profiled.trace,
    }


def page_of(record: Mapping[str, Any]) -> str:
    """Return the record as one page of Markdown."""
    first, last = record["steps"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    on_gpu = record["gpu"] is not None
    lines = [
        f"# Profile of {steps} of {record['run']}",
        "",
        f"`rft-train {record['command']}` on {record['device']}, rank 0 of {record['world_size']}; seconds, calls and "
        f"reads are those of one step, the mean of {record['num_steps']}.",
        "",
        *_speed_lines(record),
        "",
        "## Phases",
        "",
        "| phase | seconds | share | of it outside of torch |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['name']} | {row['seconds']:.4f} | {row['share']:.1%} | "
        + (f"{row['outside_of_torch']:.4f} |" if row["name"] != _OTHER else "|")
        for row in record["phases"]
    ]
    lines += ["", "Outside of torch is Python itself, and waiting for files, other processes or servers.", ""]
    lines += ["## Operations", "", *_operation_lines(record["operations"], on_gpu=on_gpu), ""]
    if on_gpu:
        gpu = record["gpu"]
        lines += [
            f"The GPU computed in {gpu['busy_share']:.1%} of the time ({gpu['kernels']:,.0f} kernels and copies a "
            f"step); the host stood in calls that wait for it for {gpu['host_waits_seconds']:.4f} s a step.",
            "",
        ]
    lines += ["## Reads of tensors by the host", "", *_read_lines(record["host_reads"])]
    if record["trace"]:
        lines += ["", f"The trace is {record['trace']} beside this page; https://ui.perfetto.dev opens it as it is."]
    return "\n".join(lines) + "\n"


def _speed_lines(record: Mapping[str, Any]) -> list[str]:
    before, now = record["seconds_a_step_before"], record["seconds_a_step"]
    took = f"A step took {now:.4f} s while it was recorded"
    lines = [f"{took}." if before is None else f"{took}, and {before:.4f} s before."]
    bound = record["bound"]
    if bound is not None:
        lines += ["", f"**What bounds the speed**: {bound['what']}.", "", f"**What to change**: {bound['do']}."]
    return lines


def _operation_lines(operations: Sequence[Mapping[str, Any]], *, on_gpu: bool) -> list[str]:
    title, rule = "| operation | phase | calls | seconds of the host |", "|---|---|---:|---:|"
    if on_gpu:
        title, rule = f"{title} seconds of the GPU |", f"{rule}---:|"
    lines = [title, rule]
    for row in operations[:_OPERATIONS]:
        name = str(row["name"]).replace("|", "\\|")
        name = name if len(name) <= 80 else f"{name[:77]}..."
        line = f"| `{name}` | {row['phase']} | {row['calls']:,.1f} | {row['host_seconds']:.4f} |"
        lines.append(f"{line} {row['device_seconds']:.4f} |" if on_gpu else line)
    return lines


def _read_lines(reads: Mapping[str, Any]) -> list[str]:
    if not reads["counted"]:
        return [f"They were not counted: {reads['why_not']}."]
    lines = [f"{reads['a_step']:.1f} a step: {reads['counted']}."]
    if reads["places"]:
        lines += ["", "| reads | place | line |", "|---:|---|---|"]
        lines += [
            f"| {row['count']:.1f} | {row['place']} | `{row['code'].replace('|', chr(92) + '|')}` |"
            for row in reads["places"][:_PLACES]
        ]
    return lines
