"""What has grown between two instants: the line that kept it, or the tensors."""

from __future__ import annotations

import tracemalloc

import torch

from rft_trainer.metrics.growth_trace import GrowthTrace

MIB = 2**20


def test_the_line_that_keeps_memory_is_told() -> None:
    kept: list[bytes] = []
    trace = GrowthTrace()
    for _ in range(3):
        kept.append(b"1" * MIB)
    first, *_ = trace.finish()
    assert first.startswith("3 MiB at ")
    assert "test_growth_trace.py:" in first
    assert not tracemalloc.is_tracing()
    assert len(kept) == 3


def test_tensors_are_told_by_type_and_shape_and_a_view_of_one_is_none() -> None:
    there = torch.zeros(512, 1024)
    trace = GrowthTrace()
    kept = [torch.zeros(256, 1024) for _ in range(4)]
    views = [one[:2] for one in kept] + [there.view(-1)]
    first, *_ = trace.finish()
    assert first == "4 MiB in 4 tensors float32 [256, 1024]"
    assert len(views) == 5


def test_a_trace_that_is_dropped_before_its_end_slows_nothing_down() -> None:
    trace = GrowthTrace()
    assert tracemalloc.is_tracing()
    del trace
    assert not tracemalloc.is_tracing()


def test_what_has_not_grown_is_not_told_and_a_trace_of_somebody_else_goes_on() -> None:
    tracemalloc.start()
    try:
        trace = GrowthTrace()
        for _ in range(3):
            bytes(MIB)
        assert trace.finish() == ()
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
