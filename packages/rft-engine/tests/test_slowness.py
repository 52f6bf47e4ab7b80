"""The figure that limits an engine, from the figures of one call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.completions import EngineStats
from rft_engine.native.engine import NativeEngine
from rft_engine.slowness import slowest_reason
from rft_engine.testing.table_model import FakeDecodableModel

BUSY = EngineStats(
    num_generated_tokens=10_000,
    num_prefill_tokens=500,
    num_decode_steps=100,
    mean_occupancy=0.95,
    tail_ratio=1.2,
    seconds=4.0,
    prefill_seconds=0.2,
    rows=100,
    rows_asked=100,
)


@pytest.mark.parametrize(
    ("stats", "cause", "words"),
    [
        (BUSY, "forward", "2500 tokens per second"),
        (EngineStats(), "nothing", "no tokens"),
        (replace(BUSY, mean_occupancy=0.2, tail_ratio=8.0), "tail", "tail ratio 8.0"),
        (replace(BUSY, mean_occupancy=0.2, tail_ratio=1.5), "occupancy", "occupancy 0.20"),
        (replace(BUSY, prefill_seconds=3.0), "prefill", "prefill share 0.75"),
        (replace(BUSY, prefill_seconds=None, num_prefill_tokens=30_000), "prefill", "prefill share 0.75"),
        (replace(BUSY, prefill_seconds=3.0, mean_occupancy=0.1, tail_ratio=9.0), "prefill", "0.75"),
        (replace(BUSY, prefill_seconds=1.4, mean_occupancy=0.1, tail_ratio=9.0), "tail", "9.0"),
        (replace(BUSY, rows=40), "memory", "40 rows of 100"),
        (replace(BUSY, num_preemptions=30), "preemptions", "30 preemptions"),
        (replace(BUSY, num_preemptions=1), "forward", "tokens per second"),
    ],
)
def test_the_limiting_number_is_named(stats: EngineStats, cause: str, words: str) -> None:
    reason = slowest_reason(stats)
    assert reason.cause == cause
    assert words in reason.text


@pytest.mark.parametrize(
    ("changes", "cause", "value"),
    [
        ({}, "forward", 2500.0),
        ({"num_preemptions": 5}, "forward", 2500.0),
        ({"num_preemptions": 6}, "preemptions", 6.0),
        ({"num_preemptions": 1, "rows": 0, "rows_asked": 0}, "preemptions", 1.0),
        ({"num_preemptions": 0, "rows": 0, "rows_asked": 0}, "forward", 2500.0),
        ({"prefill_seconds": 1.2, "mean_occupancy": 1.0}, "prefill", 0.3),
        ({"prefill_seconds": 1.19, "mean_occupancy": 1.0}, "forward", 2500.0),
        ({"prefill_seconds": 9.0}, "prefill", 1.0),
        ({"prefill_seconds": 2.0, "mean_occupancy": 0.0}, "prefill", 0.5),
        ({"prefill_seconds": None, "num_prefill_tokens": 30_000}, "prefill", 0.75),
        ({"prefill_seconds": 1.0, "seconds": 0.0, "num_prefill_tokens": 10_000}, "prefill", 0.5),
        ({"prefill_seconds": 0.0, "mean_occupancy": 0.6, "tail_ratio": 3.0}, "tail", 3.0),
        ({"prefill_seconds": 0.0, "mean_occupancy": 0.6, "tail_ratio": 2.9}, "occupancy", 0.6),
        ({"prefill_seconds": 0.0, "mean_occupancy": 0.71, "tail_ratio": 9.0}, "forward", 2500.0),
        ({"prefill_seconds": 0.8, "mean_occupancy": 0.63}, "forward", 2500.0),
        ({"prefill_seconds": 0.16, "mean_occupancy": 0.6875}, "occupancy", 0.6875),
        ({"prefill_seconds": 0.16, "mean_occupancy": 0.6875, "tail_ratio": 3.0}, "tail", 3.0),
        ({"prefill_seconds": 0.16, "mean_occupancy": 0.6876, "tail_ratio": 3.0}, "forward", 2500.0),
        ({"mean_occupancy": 0.0, "num_decode_steps": 0}, "forward", 2500.0),
        ({"mean_occupancy": 0.2, "rows": 40}, "memory", 0.4),
        ({"mean_occupancy": 0.2, "rows": 40, "tail_ratio": 9.0}, "tail", 9.0),
    ],
    ids=str,
)
def test_each_limit_and_the_figure_that_is_read(changes: dict[str, float], cause: str, value: float) -> None:
    reason = slowest_reason(replace(BUSY, **changes))  # type: ignore[arg-type]
    assert (reason.cause, reason.value) == (cause, pytest.approx(value))


def test_a_long_tail_in_an_engine_is_named() -> None:
    """One sample of sixteen goes on to the budget, the others stop at once."""
    model = FakeDecodableModel(torch.zeros(1, 5))
    engine = NativeEngine(model, max_rows=16, max_len=256)
    budgets = [[200, *[4] * 15]]
    engine.generate([[1]], [range(16)], SamplingOptions(temperature=1.0, max_new_tokens=200), budgets=budgets)
    stats = replace(engine.stats(), prefill_seconds=0.0)  # wall times of a table say nothing
    assert stats.tail_ratio == 50.0
    assert slowest_reason(stats).cause == "tail"
    assert stats.tokens_per_second == pytest.approx(stats.num_generated_tokens / stats.seconds)
