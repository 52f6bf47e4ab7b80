"""Decode steps from recordings equal plain steps, with a recorder that behaves as a CUDA graph does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from rft_models.decode import cuda_graphs
from rft_models.decode.fast_decoder import FastDecoder
from rft_models.families.registry import fast_decode_families
from rft_models.policy.load import make_policy

Build = Callable[..., Any]
WAITING = {"_local_scalar_dense", "nonzero", "unique_dim", "_unique2", "unique_consecutive"}


class Notes(TorchDispatchMode):
    """Every operation that is done under it, and what lay before in memory that was there already."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.own: set[int] = set()
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func._schema.name.split("::")[-1] not in WAITING, f"{func} waits for the device, which no graph can"
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                storage = value.untyped_storage()
                if storage.data_ptr() not in self.own:
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **kwargs)
        given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        self.own |= {value.untyped_storage().data_ptr() for value in tensors(result)} - given
        self.operations.append((func, args, kwargs, result))
        return result


def tensors(result: Any) -> list[Tensor]:
    return [value for value in (result if isinstance(result, tuple | list) else (result,)) if isinstance(value, Tensor)]


def newest(again: dict[int, Tensor], value: Any) -> Any:
    return again.get(id(value), value)


class Tape:
    """A `GraphCapture`: numbers of the host and addresses are those of the recording, which itself changes nothing."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        notes = Notes()
        with notes:
            result = forward()
        for storage, before in notes.before.values():
            storage.copy_(before)
        served = torch.full_like(result, torch.nan)

        def replay() -> Tensor:
            self.num_replays += 1
            again: dict[int, Tensor] = {}
            for func, args, kwargs, noted in notes.operations:
                arguments, keywords = tree_map(partial(newest, again), (args, kwargs))
                pairs = zip(tensors(noted), tensors(func(*arguments, **keywords)), strict=True)
                again |= {id(old): new for old, new in pairs}
            return served.copy_(again[id(result)])

        return replay


class Twins:
    """The same operations on a decoder with recordings and on one without; their logits must agree."""

    def __init__(self, policy: Any, max_rows: int = 12, max_len: int = 200) -> None:
        self.tape = Tape()
        self.vocab_size = policy.head.weight.shape[0]
        self.plain, self.recorded = FastDecoder(policy), FastDecoder(policy)
        self.recorded.record_steps(self.tape)
        self.generator = torch.Generator().manual_seed(3)
        self.caches = (self.plain.new_cache(max_rows, max_len), self.recorded.new_cache(max_rows, max_len))

    @property
    def num_recordings(self) -> int:
        assert self.recorded._recorded is not None
        return self.recorded._recorded.num_recordings

    def draw(self, *shape: int) -> Tensor:
        return torch.randint(0, self.vocab_size, shape, generator=self.generator)

    def prefill(self, lengths: list[int], copies: list[int]) -> None:
        given = (self.draw(len(lengths), max(lengths)), torch.tensor(lengths), copies)
        self.agree(*(d.prefill(c, *given) for d, c in zip((self.plain, self.recorded), self.caches, strict=True)))

    def step(self, times: int) -> None:
        for _ in range(times):
            tokens = self.draw(self.caches[0].num_rows)
            pair = zip((self.plain, self.recorded), self.caches, strict=True)
            self.agree(*(decoder.step(cache, tokens) for decoder, cache in pair))
            assert torch.equal(self.caches[0].lengths_B, self.caches[1].lengths_B)

    def change(self, what: str, rows: list[int]) -> None:
        for cache in self.caches:
            getattr(cache, what)(torch.tensor(rows, dtype=torch.int64))

    @staticmethod
    def agree(expected: Tensor, found: Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def twins(tiny_model: Build) -> Callable[..., Twins]:
    def make(model_type: str = "qwen2", **changes: Any) -> Twins:
        model = tiny_model(model_type, max_position_embeddings=256, **changes)
        return Twins(make_policy(model, None, packed=True))

    return make


@pytest.mark.parametrize("model_type", sorted(fast_decode_families()))
def test_recorded_steps_equal_plain_ones_while_rows_come_and_go(model_type: str, twins: Any) -> None:
    both = twins(model_type)
    both.prefill([4, 9, 1], [2, 1, 3])
    both.step(6)
    assert (both.num_recordings, both.tape.num_replays) == (1, 4)
    both.change("keep", [0, 2, 4])
    both.step(3)
    both.prefill([11, 2], [1, 2])
    both.step(5)
    both.change("select", [0, 0, 2, 3, 5])
    both.step(4)
    both.change("keep", [])
    both.prefill([3], [4])
    both.step(4)
    assert both.num_recordings == 5


def test_a_recording_is_made_again_when_its_columns_are_used_up(twins: Any) -> None:
    both = twins()
    both.prefill([5], [3])
    both.step(130)
    assert (both.num_recordings, both.tape.num_replays) == (3, 128)


def test_columns_that_no_row_has_written_leave_no_trace_even_if_they_are_not_finite(twins: Any) -> None:
    both = twins("llama")
    with torch.inference_mode():
        for layer in (*both.caches[1].keys, *both.caches[1].values):
            layer.fill_(torch.nan)
    both.prefill([6, 2], [2, 2])
    both.step(5)
    both.change("keep", [0, 3])
    both.prefill([4], [2])
    both.step(5)


def test_a_window_slides_within_a_recording(twins: Any) -> None:
    both = twins("mistral", sliding_window=7)
    both.prefill([5, 3], [2, 1])
    both.step(20)
    assert both.num_recordings == 1


def test_a_batch_that_changes_at_once_is_not_recorded(twins: Any) -> None:
    both = twins()
    for _ in range(4):
        both.prefill([3], [1])
        both.step(2)
    assert both.num_recordings == 0


def test_changed_weights_are_recorded_again(twins: Any, tiny_model: Build) -> None:
    both = twins()
    both.prefill([5], [2])
    both.step(4)
    with torch.no_grad():
        for parameter in both.plain._backbone.parameters():
            parameter.mul_(1.2)
    for decoder in (both.plain, both.recorded):
        decoder.refresh()
    both.step(5)
    assert both.num_recordings == 2


def test_a_recording_goes_with_its_cache(twins: Any) -> None:
    both = twins()
    both.prefill([5], [2])
    both.step(4)
    both.caches = (both.plain.new_cache(4, 64), both.recorded.new_cache(4, 64))
    both.prefill([2, 7], [1, 1])
    both.step(4)
    assert both.num_recordings == 2


def test_what_lies_on_the_host_is_brought_over_before_the_recording(
    twins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, inside, made = twins(), [False], [0]
    record, whole_block = pair.tape.record, cuda_graphs.whole_block

    def recording(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        inside[0] = True
        try:
            return record(forward)
        finally:
            inside[0] = False

    def outside(cache: Any) -> Any:
        assert not inside[0], "a copy from the host cannot be recorded"
        made[0] += 1
        return whole_block(cache)

    monkeypatch.setattr(pair.tape, "record", recording)
    monkeypatch.setattr(cuda_graphs, "whole_block", outside)
    pair.prefill([4, 9], [2, 1])
    pair.step(6)
    assert made[0] == pair.num_recordings == 1
