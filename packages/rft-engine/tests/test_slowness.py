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
