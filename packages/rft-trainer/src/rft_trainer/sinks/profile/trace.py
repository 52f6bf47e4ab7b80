"""Sums of a trace of torch's profiler: seconds of operations by phase, the share in which the GPU was busy, waits.

A trace is the list of events that `torch.profiler` exports (Chrome's format): name, category, thread, start and
duration in microseconds. A phase of a step is an annotation in it (`rft_trainer.metrics.phase_timer`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rft_trainer.metrics.phase_timer import ANNOTATION

Event = Mapping[str, Any]

_OTHER = "other"
_ON_HOST = ("cpu_op", "user_annotation")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_WAITS = ("Synchronize", "cudaEventQuery")
"""Parts of the names of calls of the CUDA runtime in which the host waits."""
_MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """All calls of one operation within one phase."""

    name: str
    phase: str
    calls: int
    host_seconds: float
    """Without the operations that it calls."""
    device_seconds: float


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Work of the GPU in the window of the trace."""

    busy_seconds: float
    """In which at least one kernel or copy was under way."""
    num_kernels: int
    host_waits_seconds: float
    """Of the host inside calls that wait for the GPU."""


@dataclass(frozen=True, slots=True)
class TraceSums:
    """The sums of a trace."""

    operations: list[TracedOperation]
    """The longest first."""
    outside_seconds: Mapping[str, float]
    """Seconds of each phase in which its thread was in no operation of torch: Python, or a wait for something else."""
    device: DeviceUse | None
    """None where there was no GPU."""


def sums_of(events: Iterable[Event]) -> TraceSums:
    """Return the sums of the events of a trace."""
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    phases = _Phases([event for event in complete if _is_phase(event)])
    host, outside = _host_seconds(complete, phases)
    device = _device_seconds(complete, phases)
    names = {*host, *device}
    operations = [
        TracedOperation(name, phase, *_calls(host.get((name, phase)), device.get((name, phase))))
        for name, phase in names
    ]
    operations.sort(key=lambda each: (-each.device_seconds, -each.host_seconds, each.name, each.phase))
    return TraceSums(operations, outside, _device_use(complete))


def _calls(host: list[float] | None, device: list[float] | None) -> tuple[int, float, float]:
    return len(host or device or ()), sum(host or ()), sum(device or ())


def _is_phase(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and str(event["name"]).startswith(ANNOTATION)


class _Phases:
    """The innermost phase at each moment."""

    def __init__(self, annotations: Sequence[Event]) -> None:
        edges: list[tuple[float, int, str]] = []
        for event in annotations:
            name = str(event["name"]).removeprefix(ANNOTATION)
            edges += [(event["ts"], 1, name), (event["ts"] + event["dur"], 0, name)]
        stack: list[str] = []
        self._starts: list[float] = []
        self._names: list[str] = []
        # an end before a beginning at the same moment
        for at, begins, name in sorted(edges):
            if begins:
                stack.append(name)
            elif name in stack:
                stack.reverse()
                stack.remove(name)
                stack.reverse()
            self._starts.append(at)
            self._names.append(stack[-1] if stack else _OTHER)

    def at(self, moment: float) -> str:
        """Return the phase of a moment in microseconds."""
        index = bisect_right(self._starts, moment) - 1
        return self._names[index] if index >= 0 else _OTHER


def _host_seconds(
    events: Sequence[Event], phases: _Phases
) -> tuple[dict[tuple[str, str], list[float]], dict[str, float]]:
    """Return the seconds of each operation and phase without those inside of it, and those of phases in none."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    outside: dict[str, float] = defaultdict(float)
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _ON_HOST:
            threads[event.get("pid"), event.get("tid")].append(event)
    for thread in threads.values():
        for event, own in _own_seconds(thread):
            phase = phases.at(event["ts"])
            if _is_phase(event):
                outside[str(event["name"]).removeprefix(ANNOTATION)] += own
            elif event["cat"] == "cpu_op":
                found[str(event["name"]), phase].append(own)
    return found, dict(outside)


def _own_seconds(thread: Sequence[Event]) -> Iterable[tuple[Event, float]]:
    """Yield the events of one thread with the seconds that are not of an event inside of them."""
    # longer first where two begin at once: the outer one
    ordered = sorted(thread, key=lambda event: (event["ts"], -event["dur"]))
    own = [float(event["dur"]) for event in ordered]
    stack: list[int] = []
    for index, event in enumerate(ordered):
        while stack and ordered[stack[-1]]["ts"] + ordered[stack[-1]]["dur"] <= event["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= event["dur"]
        stack.append(index)
    return [(event, max(seconds, 0.0) * _MICRO) for event, seconds in zip(ordered, own, strict=True)]


def _device_seconds(events: Sequence[Event], phases: _Phases) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each kernel, by the phase in which the host launched it."""
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _ON_GPU:
            launched = launches.get(event.get("args", {}).get("correlation"), event["ts"])
            found[str(event["name"]), phases.at(launched)].append(event["dur"] * _MICRO)
    return found


def _device_use(events: Sequence[Event]) -> DeviceUse | None:
    kernels = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in _ON_GPU)
    if not kernels:
        return None
    busy, until = 0.0, kernels[0][0]
    for start, end in kernels:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    waits = sum(
        event["dur"]
        for event in events
        if event.get("cat") == "cuda_runtime" and any(word in str(event["name"]) for word in _WAITS)
    )
    return DeviceUse(busy * _MICRO, len(kernels), waits * _MICRO)
