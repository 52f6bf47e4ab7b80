"""What a finished batch becomes: completions cut at their lengths, and figures by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft_engine.native.results import completions_of, stats_of

BATCH: Any = SimpleNamespace(
    tokens_SM=torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 7, 8]]),
    logprobs_SM=-torch.arange(12.0).view(3, 4),
    log_kept_mass_SM=torch.arange(12.0).view(3, 4) / 2,
    lengths_S=[3, 1, 4],
    stopped_S=[True, True, False],
    num_steps=3,
    prefill_seconds=0.25,
)


def test_completions_hold_the_tokens_up_to_their_length() -> None:
    first, second, third = completions_of(BATCH, 7)
    assert first.token_ids == (1, 2, 3)
    assert first.logprobs == (0.0, -1.0, -2.0)
    assert second.log_kept_mass == (2.0,)
    assert third.token_ids == (5, 6, 7, 8)
    assert [one.finish_reason for one in (first, second, third)] == ["stop", "stop", "length"]
    assert {one.weight_version for one in (first, second, third)} == {7}


def test_figures_of_a_call() -> None:
    found = stats_of(BATCH, 20, 2, 5, 1.5)
    assert (found.num_generated_tokens, found.num_prefill_tokens, found.num_decode_steps) == (8, 20, 3)
    assert found.mean_occupancy == pytest.approx((8 - 3) / (3 * 2))
    assert found.tail_ratio == pytest.approx(4 / 3)
    assert (found.seconds, found.prefill_seconds) == (1.5, 0.25)
    assert (found.rows, found.rows_asked) == (2, 5)
    alone: Any = SimpleNamespace(lengths_S=[1], num_steps=0, prefill_seconds=0.0)
    assert stats_of(alone, 1, 2, 2, 0.5).mean_occupancy == 0.0
