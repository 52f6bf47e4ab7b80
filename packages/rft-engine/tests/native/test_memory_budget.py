"""Rows that fit are solved for before a cache is made: a model of an allocator counts every byte and never runs out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError, PreflightError
from rft_engine.native.engine import NativeEngine
from rft_engine.native.memory_budget import CacheRequest, max_rows_that_fit
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel

CPU = torch.device("cpu")
VOCAB = 7


@dataclass
class MeteredModel(FakeDecodableModel):
    """A model on a device with so many bytes: a cache, its prompts and the logits of a step are taken from them."""

    capacity: int = 0
    of_token: int = 0
    """Bytes of keys and values of one token."""
    logit_bytes: int = 16 * VOCAB
    taken: int = 0
    most_rows: list[int] = field(default_factory=list[int])

    def cache_bytes(self, max_rows: int, max_len: int, *, num_prompts: int, prompt_len: int) -> int:
        return self.of_token * (max_rows * max_len + num_prompts * prompt_len)

    def new_cache(self, max_rows: int, max_len: int) -> FakeCache:
        self.taken = self.of_token * max_rows * max_len
        self.most_rows.append(max_rows)
        if self.taken > self.capacity:
            raise MemoryError(f"{self.taken} of {self.capacity} bytes")
        return super().new_cache(max_rows, max_len)

    def prefill(self, cache: FakeCache, token_ids_PL: Tensor, lengths_P: Tensor, copies_P: Sequence[int]) -> Tensor:
        self._use(len(copies_P) * token_ids_PL.shape[1] * self.of_token + sum(copies_P) * self.logit_bytes)
        return super().prefill(cache, token_ids_PL, lengths_P, copies_P)

    def step(self, cache: FakeCache, token_ids_B: Tensor) -> Tensor:
        self._use(cache.num_rows * self.logit_bytes)
        return super().step(cache, token_ids_B)

    def _use(self, num_bytes: int) -> None:
        if self.taken + num_bytes > self.capacity:
            raise MemoryError(f"{self.taken} + {num_bytes} of {self.capacity} bytes")


def model_of(capacity: int, of_token: int) -> MeteredModel:
    table = 1.5 * torch.randn(31, VOCAB, generator=torch.Generator().manual_seed(5))
    return MeteredModel(table, carry=3, capacity=capacity, of_token=of_token)


def engine_of(model: MeteredModel, max_rows: int, max_len: int) -> NativeEngine[FakeCache]:
    return NativeEngine(model, max_rows=max_rows, max_len=max_len, free_memory=lambda device: model.capacity)


@pytest.mark.parametrize("seed", range(40))
def test_no_setting_runs_out_and_nearly_all_rows_that_fit_are_used(seed: int):
    numbers = random.Random(seed)
    of_token, length, num_new = numbers.choice([64, 512, 4096]), 64 * numbers.randint(1, 4), numbers.randint(2, 12)
    optimum = numbers.randint(25, 250)
    prompts = [[1 + p % 6] * numbers.randint(1, length - num_new) for p in range(numbers.randint(1, 30))]
    prompts[0] = [2] * (length - num_new)
    one = of_token * length + 16 * VOCAB
    shared = of_token * len(prompts) * len(prompts[0])  # each prompt is kept once while its samples are decoded
    capacity = optimum * one + shared + numbers.randrange(one)
    asked = numbers.choice([optimum // 2, optimum, 2 * optimum, 1000])
    keys = [list(range(100 * p, 100 * p + 400 // len(prompts) + 1)) for p in range(len(prompts))]
    options = SamplingOptions(temperature=1.0, max_new_tokens=num_new, stop_token_ids=(0,))
    model = model_of(capacity, of_token)
    engine = engine_of(model, asked, length)
    found = engine.generate(prompts, keys, options)
    stats, best = engine.stats(), min(asked, optimum, sum(map(len, keys)))
    assert 0.95 * best <= stats.rows <= best
    assert stats.rows_asked == min(asked, sum(map(len, keys)))
    unlimited = engine_of(model_of(2**60, of_token), asked, length)
    assert found == unlimited.generate(prompts, keys, options)


def test_rows_that_fitted_are_kept_from_call_to_call():
    model = model_of(64 * 64 * 10, 64)
    engine = engine_of(model, 40, 64)
    for _ in range(3):
        engine.generate([[1]], [range(40)], SamplingOptions(temperature=1.0, max_new_tokens=5))
    assert len(model.most_rows) == 1
    model.capacity //= 2
    engine.generate([[1]], [range(39)], SamplingOptions(temperature=1.0, max_new_tokens=5))
    assert len(model.most_rows) == 2
    assert model.most_rows[1] < model.most_rows[0]


def test_one_sequence_that_does_not_fit_is_told_with_the_length_that_would():
    engine = engine_of(model_of(100 * 64, 64), 8, 512)
    with pytest.raises(PreflightError, match="1 sequence of 320") as caught:
        engine.generate([[1] * 300], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=20))
    assert caught.value.problem.code == "engine.memory"
    problem = caught.value.problem
    assert problem.code == "engine.memory"
    fitting = int(problem.do.split()[1].rstrip(","))
    assert f"{fitting} tokens would fit" in problem.what
    one = CacheRequest(1, fitting, 1, fitting)
    room = 100 * 64 - 100 * 64 // 64
    assert one.bytes_of(model_of(0, 64), VOCAB) <= room
    assert CacheRequest(1, fitting + 1, 1, fitting + 1).bytes_of(model_of(0, 64), VOCAB) > room


class Fragmented(MeteredModel):
    """Has the memory, and not in one piece."""

    def new_cache(self, max_rows: int, max_len: int) -> FakeCache:
        if max_rows > 6:
            self.most_rows.append(max_rows)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().new_cache(max_rows, max_len)


def test_an_allocator_that_refuses_is_asked_once_more_for_half():
    table = 1.5 * torch.randn(31, VOCAB, generator=torch.Generator().manual_seed(5))
    model = Fragmented(table, carry=3, capacity=2**40, of_token=64)
    engine = engine_of(model, 12, 64)
    engine.generate([[1]], [range(12)], SamplingOptions(temperature=1.0, max_new_tokens=5))
    assert model.most_rows == [12, 6]
    assert (engine.stats().rows, engine.stats().rows_asked) == (6, 12)
    with pytest.raises(torch.OutOfMemoryError):
        engine_of(model, 40, 64).generate([[1]], [range(40)], SamplingOptions(temperature=1.0, max_new_tokens=5))


def test_beams_of_fewer_prompts_go_together_and_too_few_rows_are_refused():
    sequences = TokenTrie.of([[1, 2], [1, 3], [4, 5], [5, 5], [6, 1]])
    prompts = [[1], [2, 3], [4]]
    wide = engine_of(model_of(2**40, 64), 64, 64)
    model = model_of(64 * 64 * 7, 64)
    tight = engine_of(model, 64, 64)
    assert tight.beam_search(prompts, sequences, num_beams=4) == wide.beam_search(prompts, sequences, num_beams=4)
    assert max(model.most_rows) < 8
    with pytest.raises(OptionsError, match=r"5 beams.*decodes 3") as caught:
        engine_of(model_of(64 * 64 * 4, 64), 64, 64).beam_search(prompts, sequences, num_beams=5)
    assert caught.value.problem.code == "engine.num_beams"


def test_a_model_that_cannot_say_is_trusted():
    assert (
        max_rows_that_fit(FakeDecodableModel(torch.zeros(1, 3)), 3, CacheRequest(9, 9, 1, 1), CPU, lambda device: 1)
        == 9
    )
    assert max_rows_that_fit(model_of(0, 64), 3, CacheRequest(9, 9, 1, 1), CPU, lambda device: None) == 9
