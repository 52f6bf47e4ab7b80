"""Records of an engine: lists of one length, and figures that are 0 before the first call."""

from __future__ import annotations

from typing import Any

import pytest

from rft_engine.completions import Completion, EngineStats


def test_the_lists_of_a_completion_have_one_length() -> None:
    Completion((1, 2), (-1.0, -2.0), (0.0, 0.0), "stop", 0)
    Completion((), (), (), "length", 0)
    lists: list[tuple[Any, Any, Any]] = [((1,), (), (0.0,)), ((1,), (-1.0,), ()), ((), (-1.0,), (0.0,))]
    for token_ids, logprobs, masses in lists:
        with pytest.raises(ValueError, match="have lengths"):
            Completion(token_ids, logprobs, masses, "stop", 0)


def test_figures_before_a_call_are_0_or_unknown() -> None:
    assert EngineStats() == EngineStats(
        num_generated_tokens=0,
        num_prefill_tokens=0,
        num_decode_steps=0,
        mean_occupancy=0.0,
        tail_ratio=0.0,
        seconds=0.0,
        prefill_seconds=None,
        num_preemptions=None,
        rows=0,
        rows_asked=0,
    )
    assert EngineStats().tokens_per_second == 0.0
    assert EngineStats(num_generated_tokens=30, seconds=4.0).tokens_per_second == 7.5
