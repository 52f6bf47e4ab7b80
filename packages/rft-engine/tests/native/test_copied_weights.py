"""The engine with weights of its own: nothing before a whole load, nothing old after one, nothing half."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import ServiceError
from rft_engine.engine_base import EngineFacts
from rft_engine.lifecycle import EngineState
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.native.copy_check import check_copy
from rft_engine.native.engine import NativeEngine
from rft_engine.testing.copied_table_model import CARRY, FakeCopy, TablePolicy, table_of
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel

PROMPTS, KEYS = [[1, 2], [3], [4, 5, 1]], [[11, 12], [13], [14, 15]]
DRAW = SamplingOptions(temperature=1.0, max_new_tokens=5)


def make(policy: TablePolicy) -> tuple[NativeEngineOnCopy[FakeCache], FakeCopy]:
    twin = FakeCopy()
    return NativeEngineOnCopy(twin, policy.provider, max_rows=4, max_len=32), twin


def ready(policy: TablePolicy) -> tuple[NativeEngineOnCopy[FakeCache], FakeCopy]:
    engine, twin = make(policy)
    engine.refresh()
    return engine, twin


def shared(policy: TablePolicy) -> NativeEngine[FakeCache]:
    return NativeEngine(FakeDecodableModel(table_of(policy.tensors), carry=CARRY), max_rows=4, max_len=32)


def tokens(engine: NativeEngine[FakeCache]) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in row] for row in engine.generate(PROMPTS, KEYS, DRAW)]


def test_nothing_is_generated_before_a_load() -> None:
    engine, _ = make(TablePolicy())
    trie = TokenTrie.of([[1, 2], [3]])
    for ask in (lambda: tokens(engine), lambda: engine.beam_search([[1]], trie, num_beams=1)):
        with pytest.raises(ServiceError) as caught:
            ask()
        assert caught.value.problem.code == "engine.weights.unfinished"
        assert caught.value.problem.do == "refresh()"
    engine.refresh()
    assert engine.weight_version == 0
    assert tokens(engine)


def test_it_draws_what_the_native_engine_draws_and_keeps_its_weights_until_a_load() -> None:
    policy = TablePolicy()
    engine, _ = ready(policy)
    trie = TokenTrie.of([[1, 2], [3, 1], [4, 4], [5, 0]])
    first = engine.generate(PROMPTS, KEYS, DRAW)
    assert first == shared(policy).generate(PROMPTS, KEYS, DRAW)
    assert engine.beam_search(PROMPTS, trie, num_beams=3) == shared(policy).beam_search(PROMPTS, trie, num_beams=3)
    policy.step(1)
    assert engine.generate(PROMPTS, KEYS, DRAW) == first
    engine.load_weights(7)
    assert tokens(engine) == tokens(shared(policy)) != [[c.token_ids for c in row] for row in first]
    assert {c.weight_version for row in engine.generate(PROMPTS, KEYS, DRAW) for c in row} == {7}


@pytest.mark.parametrize("lost", [{"rows"}, {"bias", "columns"}, {"rows", "columns", "bias"}])
def test_a_load_that_does_not_arrive_is_refused_by_name(lost: set[str]) -> None:
    policy = TablePolicy()
    engine, twin = ready(policy)
    policy.step(1)
    twin.loses = lost
    with pytest.raises(ServiceError) as caught:
        engine.load_weights(1)
    problem = caught.value.problem
    assert problem.code == "engine.logprob_parity"
    assert problem.what == (
        f"{len(lost)} of 3 tensors that the engine's copy holds are not those of version 1: " + ", ".join(sorted(lost))
    )
    assert problem.where == "engine served version 0, the trainer is at version 1"
    with pytest.raises(ServiceError, match="version 1") as caught:
        tokens(engine)
    assert caught.value.problem.code == "engine.weights.unfinished"
    twin.loses = set()
    engine.load_weights(1)
    assert tokens(engine) == tokens(shared(policy))


def test_a_load_that_breaks_off_is_not_served_and_can_be_repeated() -> None:
    policy = TablePolicy()
    engine, _ = ready(policy)
    policy.step(1)
    policy.fails_after = 2
    with pytest.raises(OSError, match="a rank is gone"):
        engine.load_weights(1)
    assert engine.weight_version == 0
    with pytest.raises(ServiceError) as caught:
        tokens(engine)
    assert caught.value.problem.code == "engine.weights.unfinished"
    policy.fails_after = None
    engine.load_weights(1)
    assert tokens(engine) == tokens(shared(policy))


def test_versions_that_are_not_newer_are_refused_before_anything_moves() -> None:
    policy = TablePolicy()
    engine, _ = ready(policy)
    engine.load_weights(3)
    before, calls = tokens(engine), policy.num_calls
    policy.step(1)
    for version in (3, 2):
        with pytest.raises(ServiceError, match="version 3") as caught:
            engine.load_weights(version)
        assert caught.value.problem.code == "engine.weights.not_newer"
    assert (policy.num_calls, tokens(engine)) == (calls, before)
    engine.close()
    for ask in (engine.refresh, lambda: engine.load_weights(9)):
        with pytest.raises(ServiceError, match="closed") as caught:
            ask()
        assert caught.value.problem.code == "engine.state"
    assert policy.num_calls == calls


def test_the_cache_does_not_outlive_a_version() -> None:
    policy = TablePolicy()
    engine, twin = ready(policy)
    for version in (1, 2):
        twin.calls.clear()
        tokens(engine)
        tokens(engine)
        assert [name for name, _ in twin.calls].count("new_cache") == 1, "kept between calls"
        policy.step(version)
        engine.load_weights(version)
    tokens(engine)
    assert [name for name, _ in twin.calls].count("new_cache") == 2


def test_level_2_frees_the_copy_and_waits_for_a_load() -> None:
    policy = TablePolicy()
    engine, twin = ready(policy)
    engine.sleep()
    assert twin.held, "level 1 keeps the weights"
    engine.sleep(2)
    engine.sleep(2)
    assert not twin.held
    engine.wake()
    with pytest.raises(ServiceError, match="were dropped") as caught:
        tokens(engine)
    assert caught.value.problem.code == "engine.state"
    engine.sleep(1)
    engine.load_weights(1)
    assert engine.state is EngineState.ASLEEP
    engine.wake()
    assert tokens(engine) == tokens(shared(policy))
    engine.close()
    engine.close()
    assert not twin.held


def test_facts_are_those_of_the_copy() -> None:
    engine, twin = make(TablePolicy())
    assert engine.facts == EngineFacts("float32", twin.vocab_size, is_cpu=True, transport="direct")
    assert engine.max_len == 32


def test_no_two_whole_tensors_exist_at_a_time() -> None:
    policy = TablePolicy()
    alive: list[weakref.ref[Tensor]] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name in policy.tensors:
            assert not any(ref() is not None for ref in alive), "the last one is held still"
            tensor = policy.tensors[name].clone()
            alive.append(weakref.ref(tensor))
            item = (name, tensor)
            del tensor
            yield item
            del item

    engine = NativeEngineOnCopy(FakeCopy(), gathered, max_rows=4, max_len=32)
    engine.load_weights(1)
    engine.policy_fingerprint()
    assert len(alive) == 6


def test_a_check_says_versions_tensors_and_the_gap() -> None:
    policy = TablePolicy()
    engine, _ = ready(policy)
    engine.load_weights(4)
    gap = check_copy(engine, policy.logprobs, trainer_version=4)
    assert gap.maximum < 1e-6
    assert (gap.weight_version, gap.num_tokens) == (4, 8)
    told = "engine replica 2 serves weights v4, trainer is at v5; 0 of 3 tensors differ; probe log-prob gap"
    with pytest.raises(ServiceError, match=told) as caught:
        check_copy(engine, policy.logprobs, trainer_version=5, replica=2)
    assert caught.value.problem.code == "engine.logprob_parity"
    with pytest.raises(ServiceError, match="v5") as caught:
        tokens(engine)
    assert caught.value.problem.code == "engine.logprob_parity"
    engine.load_weights(5)
    policy.step(3)
    with pytest.raises(ServiceError, match=r"3 of 3 tensors differ: bias, columns, rows; .*limit 0\.0001") as caught:
        check_copy(engine, policy.logprobs, trainer_version=5)
    assert caught.value.problem.code == "engine.logprob_parity"


def test_digests_see_a_step_that_no_probe_could() -> None:
    policy = TablePolicy()
    engine, _ = ready(policy)
    policy.step(1, size=1e-6)
    with pytest.raises(ServiceError, match="3 of 3") as caught:
        check_copy(engine, policy.logprobs, trainer_version=0)
    assert caught.value.problem.code == "engine.logprob_parity"
    assert float(caught.value.problem.what.split("gap ")[1].split(" ")[0]) < 1e-4


def test_a_probe_sees_what_is_computed_from_right_tensors() -> None:
    policy = TablePolicy()
    engine, twin = ready(policy)
    policy.step(1)
    old = twin.log_SV
    engine.load_weights(1)
    twin.log_SV = old
    with pytest.raises(ServiceError, match="0 of 3") as caught:
        check_copy(engine, policy.logprobs, trainer_version=1)
    assert caught.value.problem.code == "engine.logprob_parity"
    assert "a cache, a kernel" in caught.value.problem.why


def test_the_limit_can_be_given() -> None:
    policy = TablePolicy()
    engine, _ = ready(policy)

    def shifted(prompts: Any, completions: Any) -> list[list[float]]:
        return [[value + 0.5 for value in row] for row in policy.logprobs(prompts, completions)]

    assert check_copy(engine, shifted, trainer_version=0, limit=0.6).maximum == pytest.approx(0.5, abs=1e-5)
    with pytest.raises(ServiceError, match=r"gap 0\.5.*0\.4\)") as caught:
        check_copy(engine, shifted, trainer_version=0, limit=0.4)
    assert caught.value.problem.code == "engine.logprob_parity"


@pytest.mark.parametrize("place", [0, 3])
def test_an_engine_whose_gap_is_not_a_number_is_distrusted(place: int) -> None:
    policy = TablePolicy()
    engine, _ = ready(policy)

    def spoilt(prompts: Any, completions: Any) -> list[list[float]]:
        [first, *rest] = policy.logprobs(prompts, completions)
        return [[*first[:place], math.nan, *first[place + 1 :]], *rest]

    with pytest.raises(ServiceError) as caught:
        check_copy(engine, spoilt, trainer_version=0)
    assert caught.value.problem.code == "engine.logprob_parity"
    with pytest.raises(ServiceError) as caught:
        tokens(engine)
    assert caught.value.problem.code == "engine.logprob_parity"
    engine.refresh()
    assert tokens(engine) == tokens(shared(policy))
