"""When the rows of a batch change: steps of a segment, rows that leave together, and prompts that enter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.native import continuous_batch as module
from rft_engine.native.continuous_batch import ContinuousBatch
from rft_engine.native.engine import NativeEngine
from rft_engine.native.scheduler import PrefillScheduler
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel

TABLE = torch.randn((11, 7), generator=torch.Generator().manual_seed(3))


def batch_of(
    budgets: Sequence[int], copies: Sequence[int], max_rows: int
) -> tuple[ContinuousBatch[FakeCache], PrefillScheduler, FakeDecodableModel]:
    """A batch of prompts of one token each, with as many samples of these budgets as `copies` say."""
    model = FakeDecodableModel(TABLE, carry=3)
    options = SamplingOptions(temperature=1.0, max_new_tokens=max(budgets))
    prompts = [[place % 7] for place in range(len(copies))]
    arguments = (prompts, range(len(budgets)), options, torch.device("cpu"), budgets)
    batch = ContinuousBatch(model, model.new_cache(max_rows, 256), *arguments)
    return batch, PrefillScheduler([1] * len(copies), copies, max_rows), model


def rows_of(model: FakeDecodableModel) -> list[int]:
    return [rows for name, (rows, *_) in model.calls if name == "step"]


@pytest.mark.parametrize(
    ("budgets", "copies", "max_rows", "rows"),
    [
        # a fifth of ten rows is two: the second that ends takes the first with it
        ([3, 4, 9, 9, 9, 9, 9, 9, 9, 9], [10], 10, [10] * 3 + [8] * 5),
        # a fifth of six is rounded up
        ([3, 4, 9, 9, 9, 9], [6], 6, [6] * 3 + [4] * 5),
        ([3, 9, 9, 9, 9], [5], 5, [5] * 2 + [4] * 6),
        # nobody leaves before the samples of the next prompt have room
        ([2, 4, 6, 6, 6, 5, 5], [5, 2], 5, [5] * 3 + [5] * 2 + [2] * 2),
        ([2, 4, 6, 6, 6, 5], [5, 1], 5, [5] * 1 + [5] * 2 + [4] * 2),
        # two samples of a prompt wait for a second free row
        ([2, 4, 6, 6, 5, 5], [4, 2], 5, [4] * 1 + [5] * 2 + [4] * 2),
    ],
)
def test_how_many_rows_each_step_has(
    budgets: Sequence[int], copies: Sequence[int], max_rows: int, rows: Sequence[int]
) -> None:
    batch, queue, model = batch_of(budgets, copies, max_rows)
    batch.run(queue)
    assert (batch.num_steps, batch.lengths_S) == (len(rows_of(model)), list(budgets))
    assert rows_of(model) == rows
    assert not batch.advance(queue)


def test_a_segment_has_64_steps_at_most() -> None:
    batch, queue, model = batch_of([150], [1], 1)
    ends: list[int] = []
    while batch.advance(queue):
        ends.append(len(rows_of(model)))
    assert ends == [0, 64, 128, 149]


def test_the_cache_is_compacted_only_where_rows_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[int]] = []
    keep = FakeCache.keep
    monkeypatch.setattr(FakeCache, "keep", lambda cache, rows: (kept.append(rows.tolist()), keep(cache, rows))[1])
    batch, queue, _ = batch_of([150, 150, 3], [3], 3)
    batch.run(queue)
    assert kept == [[0, 1], []]


def test_steps_end_with_the_row_that_stops_and_not_with_its_budget() -> None:
    count_up = torch.full((7, 7), -50.0)
    for token in range(7):
        count_up[token, (token + 1) % 7] = 50.0
    model = FakeDecodableModel.bigram(count_up)
    options = SamplingOptions(temperature=1.0, max_new_tokens=60, stop_token_ids=(6,))
    arguments = ([[1], [3]], range(2), options, torch.device("cpu"), [60, 60])
    batch = ContinuousBatch(model, model.new_cache(2, 256), *arguments)
    batch.run(PrefillScheduler([1, 1], [1, 1], 2))
    assert (batch.lengths_S, batch.stopped_S) == ([5, 3], [True, True])
    assert batch.tokens_SM[0, :5].tolist() == [2, 3, 4, 5, 6]
    assert rows_of(model) == [2, 2, 1, 1]


def test_prompts_enter_as_long_as_there_is_room_and_their_time_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = count(100.0, 2.5)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    batch, queue, model = batch_of([2] * 7, [2, 2, 2, 1], 4)
    assert (batch.prefill_seconds, batch.num_steps) == (0.0, 0)
    batch.run(queue)
    assert [copies for name, copies in model.calls if name == "prefill"] == [(2, 2), (2, 1)]
    assert batch.prefill_seconds == 5.0


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8])
@pytest.mark.parametrize("min_new", [0, 1, 2, 4])
def test_stops_and_budgets_end_samples_where_one_alone_would_end(max_rows: int, min_new: int) -> None:
    options = SamplingOptions(temperature=1.0, max_new_tokens=8, stop_token_ids=(0, 3), min_new_tokens=min_new)
    prompts, keys = [[1], [2, 4], [5]], [[1, 2, 3], [4, 5], [6, 7]]
    budgets = [[8, 5, 6], [8, 5], [6, 7]]
    engine = NativeEngine(FakeDecodableModel(TABLE, carry=3), max_rows=max_rows, max_len=32)
    found = engine.generate(prompts, keys, options, budgets=budgets)
    alone = NativeEngine(FakeDecodableModel(TABLE, carry=3), max_rows=1, max_len=32)
    for prompt, row, prompt_keys, allowed in zip(prompts, found, keys, budgets, strict=True):
        for one, key, budget in zip(row, prompt_keys, allowed, strict=True):
            assert alone.generate([prompt], [[key]], options, budgets=[[budget]]) == [[one]]
            stops = [place for place, token in enumerate(one.token_ids) if token in (0, 3)]
            assert stops == ([len(one.token_ids) - 1] if one.finish_reason == "stop" else [])
            assert all(place >= min_new for place in stops)
            assert one.finish_reason == "stop" or len(one.token_ids) == budget
