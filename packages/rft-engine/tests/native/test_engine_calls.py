"""What the in-process engine asks of its model, call by call: caches, prefills and refreshes, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError, ServiceError
from rft_engine.completions import EngineStats
from rft_engine.lifecycle import EngineState
from rft_engine.native import engine as module
from rft_engine.native.engine import NativeEngine
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel

VOCAB = 7
TABLE = torch.randn((11, VOCAB), generator=torch.Generator().manual_seed(3))
ENDLESS = SamplingOptions(temperature=1.0, max_new_tokens=6)


@dataclass
class SizedModel(FakeDecodableModel):
    """A table model that says how large its caches are, and lists what it was asked."""

    sizes: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    bytes_of_row: int = 1

    def cache_bytes(self, max_rows: int, max_len: int, *, num_prompts: int, prompt_len: int) -> int:
        self.sizes.append((max_rows, max_len, num_prompts, prompt_len))
        return self.bytes_of_row * max_rows


class Memory:
    """Free memory of a device, and how often it was asked for."""

    def __init__(self, free: int = 2**30) -> None:
        self.free, self.asked = free, list[str]()

    def __call__(self, device: torch.device) -> int:
        self.asked.append(device.type)
        return self.free


def made(max_rows: int = 8, max_len: int = 200, **fields: Any) -> tuple[NativeEngine[FakeCache], SizedModel, Memory]:
    model, memory = SizedModel(TABLE, carry=3, **fields), Memory()
    return NativeEngine(model, max_rows=max_rows, max_len=max_len, free_memory=memory), model, memory


def caches(model: SizedModel) -> list[tuple[int, ...]]:
    return [shape for name, shape in model.calls if name == "new_cache"]


@pytest.mark.parametrize(
    ("max_rows", "max_len", "positions", "code"),
    [
        (1, 2, 50, None),
        (1, 50, 50, None),
        (1, 5000, 0, None),
        (0, 5, 50, "engine.max_rows"),
        (1, 1, 50, "engine.max_len"),
        (1, 51, 50, "engine.max_len"),
        (1, 1, 0, "engine.max_len"),
    ],
)
def test_sizes_that_a_model_can_place(max_rows: int, max_len: int, positions: int, code: str | None) -> None:
    model = SizedModel(TABLE, max_positions=positions)
    if code is None:
        NativeEngine(model, max_rows=max_rows, max_len=max_len)
        return
    with pytest.raises(OptionsError) as caught:
        NativeEngine(model, max_rows=max_rows, max_len=max_len)
    assert caught.value.problem.code == code


@pytest.mark.parametrize(
    ("prompts", "keys", "shape", "longest"),
    [
        ([[1], [2, 3]], [[1, 2], [3]], (3, 64), 2),
        ([[1] * 58, [2]], [[1, 2], [3]], (3, 64), 58),
        ([[2], [1] * 59], [[1, 2], [3]], (3, 128), 59),
        ([[2], [1] * 190], [[1, 2], [3] * 9], (8, 200), 190),
    ],
)
def test_a_cache_has_room_for_its_call_in_steps_of_64(
    prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], shape: tuple[int, int], longest: int
) -> None:
    engine, model, _ = made()
    engine.generate(prompts, keys, ENDLESS)
    assert caches(model) == [shape]
    assert model.sizes[-1] == (*shape, len(prompts), longest)
    assert (engine.stats().rows, engine.stats().rows_asked) == (shape[0], min(8, sum(map(len, keys))))


def test_the_memory_is_asked_for_again_only_where_a_call_asks_for_another_cache() -> None:
    engine, model, memory = made(bytes_of_row=2**20)
    memory.free = 5 * 2**20
    for _ in range(2):
        engine.generate([[1]], [range(6)], ENDLESS)
        memory.free = 0
    assert (caches(model), memory.asked, engine.stats().rows) == ([(4, 64)], ["cpu"], 4)
    memory.free = 2**40
    engine.generate([[1]], [range(5)], ENDLESS)
    engine.generate([[1] * 60], [range(5)], ENDLESS)
    assert (caches(model)[1:], len(memory.asked)) == ([(5, 64), (5, 128)], 3)
    engine.sleep()
    engine.wake()
    engine.generate([[1] * 60], [range(5)], ENDLESS)
    assert (len(caches(model)), len(memory.asked)) == (4, 4)


def test_figures_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = made()
    assert engine.stats() == EngineStats()
    times = count(100.0, 1.5)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    engine.generate([[1, 2], [3]], [[1, 2], [3]], ENDLESS)
    stats = engine.stats()
    assert (stats.num_generated_tokens, stats.num_prefill_tokens, stats.num_decode_steps) == (18, 3, 5)
    assert (stats.seconds, stats.mean_occupancy, stats.tail_ratio) == (1.5, 1.0, 1.0)
    engine.generate([[1]], [[]], ENDLESS)
    assert engine.stats() == EngineStats()
    trie = TokenTrie.of([[1, 2], [3, 4], [5, 6]])
    engine.beam_search([[1, 2], [3]], trie, num_beams=2)
    assert engine.stats() == EngineStats(num_generated_tokens=8, num_prefill_tokens=3, num_decode_steps=1, seconds=1.5)


def test_media_reach_the_model_beside_their_prompts() -> None:
    engine, _, _ = made()
    plain = engine.generate([[1]] * 3, [[1], [2], [3]], ENDLESS)
    assert engine.generate([[1]] * 3, [[1], [2], [3]], ENDLESS, media=[None, None, None]) == plain
    found = engine.generate([[1]] * 3, [[1], [2], [3]], ENDLESS, media=[None, 4, 5])
    assert found[0] == plain[0]
    assert found[1:] != plain[1:]
    with pytest.raises(OptionsError) as caught:
        engine.generate([[1]], [[1]], ENDLESS, media=[None, 4])
    assert caught.value.problem.code == "engine.media"


def test_beams_of_prompts_of_like_length_are_searched_together() -> None:
    trie = TokenTrie.of([[1, 2, 0], [1, 3, 0], [4, 5, 0], [6, 6, 0]])
    prompts = [[1], [2] * 70, [3, 4], [5] * 60, [6] * 3]
    wide, _, _ = made(max_rows=100)
    engine, model, _ = made(max_rows=6)
    found = engine.beam_search(prompts, trie, num_beams=3, temperature=0.7, mass="allowed")
    assert found == wide.beam_search(prompts, trie, num_beams=3, temperature=0.7, mass="allowed")
    assert [row for prompt in prompts for row in engine.beam_search([prompt], trie, num_beams=3)] == (
        wide.beam_search(prompts, trie, num_beams=3)
    )
    # two prompts a search, the longest first
    assert [size for size in model.sizes if size[0] == 6][:2] == [(6, 128, 2, 70), (6, 64, 2, 3)]
    assert [copies for name, copies in model.calls if name == "prefill"][:3] == [(1, 1), (1, 1), (1,)]


def test_what_no_search_can_give_is_refused() -> None:
    engine, model, _ = made(max_rows=3, max_len=20)
    trie = TokenTrie.of([[1, 2], [1, 3], [4, 5], [6, 6]])
    for prompts, num_beams, code in (
        ([[1]], 4, "engine.num_beams"),
        ([[1] * 19], 2, "engine.prompt_too_long"),
        ([[VOCAB]], 2, "engine.unknown_token"),
    ):
        with pytest.raises(OptionsError) as caught:
            engine.beam_search(prompts, trie, num_beams=num_beams)
        assert caught.value.problem.code == code
    assert caches(model) == []
    assert len(engine.beam_search([[1] * 18], trie, num_beams=3)[0]) == 3
    engine.sleep()
    with pytest.raises(ServiceError) as refused:
        engine.beam_search([[1]], trie, num_beams=1)
    assert refused.value.problem.code == "engine.state"


def test_new_weights_refresh_the_model_and_old_ones_do_not() -> None:
    engine, model, _ = made()
    engine.load_weights(3)
    engine.refresh()
    assert (model.num_refreshes, engine.weight_version) == (2, 3)
    for version in (3, 2):
        with pytest.raises(ServiceError) as caught:
            engine.load_weights(version)
        assert caught.value.problem.code == "engine.weights.not_newer"
    assert model.num_refreshes == 2
    engine.sleep(2)
    engine.wake()
    with pytest.raises(ServiceError):
        engine.generate([[1]], [[1]], ENDLESS)
    engine.refresh()
    assert engine.generate([[1]], [[1]], ENDLESS)[0][0].weight_version == 3
    engine.close()
    engine.close()
    assert engine.state is EngineState.CLOSED
    for ask in (engine.refresh, engine.sleep, engine.wake, lambda: engine.load_weights(9)):
        with pytest.raises(ServiceError) as caught:
            ask()
        assert caught.value.problem.code == "engine.state"
    assert model.num_refreshes == 3


def test_sleep_and_close_give_the_cache_back() -> None:
    for ask in ("sleep", "close"):
        engine, _, _ = made()
        engine.generate([[1]], [[1]], ENDLESS)
        assert engine._cache is not None  # pyright: ignore[reportPrivateUsage]
        getattr(engine, ask)()
        assert engine._cache is None  # pyright: ignore[reportPrivateUsage]
        if ask == "sleep":
            assert engine.state is EngineState.ASLEEP
            engine.wake()
            assert engine.generate([[1]], [[1]], ENDLESS), "level 1 keeps the weights"


def test_a_constraint_that_an_option_contradicts_is_refused_before_anything_is_drawn() -> None:
    engine, model, _ = made()
    trie = TokenTrie.of([[1, 2, 3, 4], [5, 6, 1, 2]])
    with pytest.raises(OptionsError) as caught:
        engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=3), constraint=trie)
    assert caught.value.problem.code == "engine.constraint.budget"
    assert model.calls == []
