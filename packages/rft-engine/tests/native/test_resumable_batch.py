"""Calls that are interrupted and resumed: every token by hand, the caches that are asked for, and when rows leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError, ServiceError
from rft_core.keyed_random import uniforms
from rft_engine.native import resumable_batch
from rft_engine.native.partial_requests import SampledTokens, SampleRequests
from rft_engine.native.resumable_batch import ResumableEngine
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel
from rft_engine.weight_sync.shared_images import SharedImage

VOCAB, STOP = 7, 0
TABLE = torch.randn((11, VOCAB), generator=torch.Generator().manual_seed(3))
ENDLESS = TABLE.clone()
ENDLESS[:, STOP] = -1e9
"""The stop token is never drawn."""


@dataclass
class SizedModel(FakeDecodableModel):
    """A table model that says how large its caches are, and lists what it was asked."""

    sizes: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])

    def cache_bytes(self, max_rows: int, max_len: int, *, num_prompts: int, prompt_len: int) -> int:
        self.sizes.append((max_rows, max_len, num_prompts, prompt_len))
        return 1


def model_of(table: torch.Tensor = TABLE) -> SizedModel:
    return SizedModel(table, carry=3)


def engine_of(model: SizedModel, max_rows: int = 8, max_len: int = 64) -> ResumableEngine[FakeCache]:
    return ResumableEngine(model, max_rows=max_rows, max_len=max_len, free_memory=lambda device: 2**40)


def call_of(
    prefixes: Sequence[Sequence[int]], budgets: Sequence[int], starts: Sequence[int] | None = None
) -> SampleRequests:
    num = len(prefixes)
    options = SamplingOptions(temperature=1.0, max_new_tokens=max(budgets, default=1), stop_token_ids=(STOP,))
    return SampleRequests(prefixes, range(50, 50 + num), starts or [0] * num, budgets, options)


def looks(limit: int = 2000) -> tuple[Callable[[], bool], list[int]]:
    """What the engine asks after every step: true after `limit` looks; with it the list of looks."""
    asked: list[int] = []

    def interrupted() -> bool:
        asked.append(len(asked))
        assert len(asked) < 5000, "the call does not end"
        return len(asked) > limit

    return interrupted, asked


def draw(engine: ResumableEngine[FakeCache], call: SampleRequests, limit: int = 2000) -> list[SampledTokens]:
    return sorted(engine.draw(call, looks(limit)[0]), key=lambda one: one.request)


def by_hand(
    model: SizedModel, prefix: Sequence[int], key: int, start: int, budget: int, media: int = 0
) -> tuple[list[int], list[float], str]:
    """One token after the other: token t with draw `start + t` of the key, until the stop token or the budget."""
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < budget and tokens[-1:] != [STOP]:
        logits = model.logits_after([*prefix, *tokens], media)
        cumulative = logits.double().softmax(-1).cumsum(0)
        drawn = uniforms([key], 1, start + len(tokens))[0, 0]
        tokens.append(int(torch.searchsorted(cumulative, drawn, right=True)))
        logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
    return tokens, logprobs, "stop" if tokens[-1] == STOP else "length"


@pytest.mark.parametrize("max_rows", [1, 3, 20])
def test_every_request_is_the_one_drawn_by_hand(max_rows: int) -> None:
    prefixes = [(1,), (2, 3), (1,), (4, 5, 6), (2, 3), (1,), (3,) * 9, (5, 5)]
    call = call_of(prefixes, [20, 1, 7, 30, 12, 20, 3, 9], [0, 1, 0, 2, 0, 0, 5, 1])
    model = model_of()
    engine = engine_of(model, max_rows)
    engine.load_weights(4)
    found = draw(engine, call)
    assert [one.request for one in found] == list(range(8))
    for one in found:
        i = one.request
        tokens, logprobs, reason = by_hand(model, prefixes[i], call.keys[i], call.starts[i], call.budgets[i])
        assert list(one.token_ids) == tokens
        assert one.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert one.log_kept_mass == (0.0,) * len(tokens)
        assert (one.finish_reason, one.weight_version) == (reason, 4)
    assert {one.finish_reason for one in found} == {"stop", "length"}
    if max_rows == 20:
        assert sorted(copies for name, sizes in model.calls if name == "prefill" for copies in sizes) == [1, 1, 1, 2, 3]


def test_equal_tokens_after_different_images_are_different_prompts() -> None:
    prefixes, places, numbers = [(1, 2)] * 6, [0, 1, -1, 0, 2, -1], [5, 9, 2]
    options = SamplingOptions(temperature=1.0, max_new_tokens=8, stop_token_ids=(STOP,))
    shown = [SharedImage(number) for number in numbers]
    call = SampleRequests(prefixes, range(6), [0] * 6, [8] * 6, options, places, shown)
    model = model_of()
    found = draw(engine_of(model), call)
    for one, place in zip(found, places, strict=True):
        media = numbers[place] if place >= 0 else 0
        assert list(one.token_ids) == by_hand(model, (1, 2), one.request, 0, 8, media)[0]
    assert [copies for name, copies in model.calls if name == "prefill"] == [(2, 1, 2, 1)]


@pytest.mark.parametrize("limit", [0, 1, 5, 17, 40])
def test_an_interrupted_call_hands_out_the_beginning_of_every_request(limit: int) -> None:
    prefixes, budgets = [(1,), (2, 3), (4,), (5, 6)], [40, 3, 40, 40]
    model = model_of(ENDLESS)
    engine = engine_of(model, max_rows=3)
    found = draw(engine, call_of(prefixes, budgets), limit)
    assert [one.request for one in found] == [0, 1, 2, 3]
    for one in found:
        tokens, _, _ = by_hand(model, prefixes[one.request], 50 + one.request, 0, budgets[one.request])
        assert list(one.token_ids) == tokens[: len(one.token_ids)]
        whole = len(one.token_ids) == budgets[one.request]
        assert one.finish_reason == ("length" if whole and limit > 1 else "interrupted")
    assert any(one.finish_reason == "interrupted" for one in found)
    assert bool(found[1].token_ids) is (limit > 0)


def test_the_end_of_a_call_is_asked_for_after_every_step_and_results_are_looked_at_every_sixteen() -> None:
    model = model_of(ENDLESS)
    interrupted, asked = looks()
    [one] = engine_of(model).draw(call_of([(1,)], [34]), interrupted)
    assert len(one.token_ids) == 34
    steps = [name for name, _ in model.calls].count("step")
    assert steps == 33
    # the prefill, three segments of at most 16 steps, and the look that finds nothing left
    assert len(asked) == steps + 1 + 3 + 1


def test_a_cache_is_kept_after_a_whole_call_and_not_after_an_interrupted_one() -> None:
    model = model_of(ENDLESS)
    engine = engine_of(model)
    call = call_of([(1,), (2,)], [9, 9])
    shapes: list[int] = []
    for limit in (2000, 2000, 3, 2000):
        draw(engine, call, limit)
        shapes.append([name for name, _ in model.calls].count("new_cache"))
    assert shapes == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("max_len", "lengths", "budgets", "shape"),
    [(200, (70, 1), (5, 10), (2, 128)), (100, (70, 3), (5, 40), (2, 100)), (200, (3, 2, 1, 1, 1), (4,) * 5, (3, 64))],
)
def test_a_cache_has_the_rows_and_the_length_of_its_call(
    max_len: int, lengths: Sequence[int], budgets: Sequence[int], shape: tuple[int, int]
) -> None:
    model = model_of()
    engine = engine_of(model, max_rows=3, max_len=max_len)
    call = call_of([[1] * length for length in lengths], budgets)
    draw(engine, call)
    assert [size for name, size in model.calls if name == "new_cache"] == [shape]
    prompts = len(set(lengths))
    assert model.sizes[-1] == (*shape, min(prompts, shape[0]), max(lengths))
    assert engine.stats().rows_asked == shape[0] == engine.stats().rows


def rows_of_steps(max_len: int) -> list[int]:
    """Rows of each step of a call of twelve requests: the first ends after ten tokens, the others after twenty."""
    model = model_of(ENDLESS)
    prefixes = [[1] * 30, *([place % 6 + 1] for place in range(11))]
    budgets = [10, 20, 20, 12, *[20] * 8]
    found = draw(engine_of(model, max_rows=12, max_len=max_len), call_of(prefixes, budgets))
    assert [len(one.token_ids) for one in found] == budgets
    return [rows for name, (rows, *_) in model.calls if name == "step"]


def test_a_row_at_the_end_of_its_cache_leaves_at_once_and_else_rows_leave_together() -> None:
    together = [12] * 16 + [10] * 3
    assert rows_of_steps(64) == together, "one in five is to be done before a segment ends early"
    assert rows_of_steps(50) == together, "the longest prefix and the largest budget fit exactly"
    assert rows_of_steps(49) == [12] * 9 + [11] * 2 + [10] * 8
    assert rows_of_steps(40) == [12] * 9 + [11] * 2 + [10] * 8


def test_figures_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    times = count(10.0, 2.5)
    monkeypatch.setattr(resumable_batch, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    engine = engine_of(model_of(ENDLESS), max_rows=3)
    draw(engine, call_of([(1, 2), (1, 2), (3,), (4,)], [3, 3, 3, 5]))
    stats = engine.stats()
    assert stats.seconds == 2.5
    assert (stats.num_generated_tokens, stats.num_prefill_tokens) == (14, 4)
    assert (stats.rows, stats.rows_asked) == (3, 3)


def test_what_cannot_be_drawn_is_refused_before_anything_moves() -> None:
    model = model_of()
    engine = engine_of(model)
    with pytest.raises(OptionsError) as refused:
        draw(engine, call_of([[1] * 60], [10]))
    assert refused.value.problem.code == "engine.prompt_too_long"
    with pytest.raises(OptionsError) as refused:
        draw(engine, call_of([[VOCAB]], [10]))
    assert refused.value.problem.code == "engine.unknown_token"
    interrupted, asked = looks()
    assert list(engine.draw(call_of([], []), interrupted)) == []
    engine.sleep()
    with pytest.raises(ServiceError) as caught:
        draw(engine, call_of([[1]], [10]))
    assert caught.value.problem.code == "engine.state"
    assert (model.calls, asked) == ([], [])
