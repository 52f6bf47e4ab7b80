"""Sums of a trace whose events were written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from rft_trainer.sinks.profile.trace import DeviceUse, TracedOperation, sums_of


def event(name: str, category: str, start: float, duration: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 9,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def test_every_operation_has_its_own_seconds_in_the_innermost_phase() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        event("phase train", "user_annotation", 100, 1000),
        event("aten::linear", "cpu_op", 200, 300),
        event("aten::mm", "cpu_op", 250, 200),
        event("phase sync", "user_annotation", 700, 200),
        event("aten::mm", "cpu_op", 750, 50),
        event("aten::mm", "cpu_op", 1000, 50),
        event("aten::add", "cpu_op", 2000, 10),
        # a backward pass runs in a thread of its own, within the same phase
        event("aten::mm", "cpu_op", 300, 400, thread=2),
    ]
    found = sums_of(reversed(events))
    seconds = {(each.name, each.phase): (each.calls, each.host_seconds) for each in found.operations}
    assert seconds == {
        ("aten::linear", "train"): (1, pytest.approx(100e-6)),
        ("aten::mm", "train"): (3, pytest.approx(650e-6)),
        ("aten::mm", "sync"): (1, pytest.approx(50e-6)),
        ("aten::add", "other"): (1, pytest.approx(10e-6)),
    }
    assert found.operations[0].name == "aten::mm"
    # the phase itself: without its operations and without the phase inside of it
    assert found.outside_seconds == {"train": pytest.approx(450e-6), "sync": pytest.approx(150e-6)}
    assert found.device is None


def test_a_kernel_belongs_to_the_phase_that_launched_it_and_overlaps_count_once() -> None:
    events = [
        event("phase train", "user_annotation", 0, 100),
        event("cudaLaunchKernel", "cuda_runtime", 10, 5, correlation=1),
        event("cudaDeviceSynchronize", "cuda_runtime", 110, 30),
        event("gemm", "kernel", 120, 50, thread=7, correlation=1),
        event("copy", "gpu_memcpy", 150, 40, thread=8, correlation=2),
    ]
    found = sums_of(events)
    assert found.operations == [
        TracedOperation("gemm", "train", 1, 0, pytest.approx(50e-6)),
        TracedOperation("copy", "other", 1, 0, pytest.approx(40e-6)),
    ]
    assert found.device == DeviceUse(pytest.approx(70e-6), 2, pytest.approx(30e-6))


def test_an_empty_trace_has_no_sums() -> None:
    found = sums_of([])
    assert (found.operations, found.outside_seconds, found.device) == ([], {}, None)
