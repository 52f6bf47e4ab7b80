"""Several engines in processes as one: the same tokens however many there are, through interruptions and deaths."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import RftError, ServiceError
from rft_engine.completions import Completion
from rft_engine.engine_base import EngineFacts
from rft_engine.native.engine import NativeEngine
from rft_engine.native.partial_requests import SampledTokens, SampleRequests
from rft_engine.native.resumable_batch import ResumableEngine
from rft_engine.process.client import EngineDied
from rft_engine.process.hang_watch import HangLimits
from rft_engine.replicas.engine import ReplicaEngine
from rft_engine.replicas.load_balancing import assign_samples
from rft_engine.replicas.process import ProcessReplica, ReplicaLimits, ReplicaProcess
from rft_engine.testing.replica_worker import CARRY, COMMAND, VOCAB, table_of
from rft_engine.testing.table_model import FakeDecodableModel
from rft_engine.weight_sync.shared_memory import SharedWeightStore, WeightSnapshot

PROMPTS = [(1,), (2, 3), (4,), (5, 6, 1), (2,), (3, 3)]
KEYS = [[100 * p + s for s in range(3)] for p in range(len(PROMPTS))]
OPTIONS = SamplingOptions(temperature=1.0, max_new_tokens=40, stop_token_ids=(0,))
LIMITS = ReplicaLimits(silence=20.0)


class Weights:
    """What is trained here."""

    def __init__(self) -> None:
        self.table = table_of(0)

    def provider(self) -> Iterator[tuple[str, Tensor]]:
        yield "table", self.table


def expected(seed: int, **rest: Any) -> list[list[Completion]]:
    """What one engine in this process draws."""
    engine = NativeEngine(FakeDecodableModel(table_of(seed), carry=CARRY), max_rows=18, max_len=64)
    return engine.generate(PROMPTS, KEYS, OPTIONS, **rest)


def tokens_of(completions: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[one.token_ids for one in group] for group in completions]


def pool(
    path: Path, weights: Weights, models: Sequence[dict[str, Any]], limits: ReplicaLimits = LIMITS
) -> ReplicaEngine:
    """Started replicas with these weights."""
    replicas = [
        ProcessReplica(n, COMMAND, model, max_rows=18, max_len=64, log_path=path / f"{n}.log", limits=limits)
        for n, model in enumerate(models)
    ]
    for replica in replicas:
        replica.ready()
    engine = ReplicaEngine(replicas, SharedWeightStore(weights.provider, torch.float32, num_bytes=1000), max_len=64)
    engine.refresh()
    return engine


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ReplicaEngine, Weights]]:
    weights = Weights()
    engine = pool(tmp_path_factory.mktemp("two"), weights, [{"pause": 0.002}, {"pause": 0.002}])
    yield engine, weights
    engine.close()


def test_two_replicas_draw_what_one_engine_draws_and_follow_the_weights(two: tuple[ReplicaEngine, Weights]) -> None:
    engine, weights = two
    assert tokens_of(engine.generate(PROMPTS, KEYS, OPTIONS)) == tokens_of(expected(0))
    weights.table = table_of(1)
    assert tokens_of(engine.generate(PROMPTS, KEYS, OPTIONS)) == tokens_of(expected(0)), "a copy, not the weights"
    engine.load_weights(1)
    after = engine.generate(PROMPTS, KEYS, OPTIONS)
    assert tokens_of(after) == tokens_of(expected(1))
    assert {one.weight_version for group in after for one in group} == {1}
    budgets = [[1 + s + p for s in range(3)] for p in range(len(PROMPTS))]
    limited = engine.generate(PROMPTS, KEYS, OPTIONS, budgets=budgets)
    assert tokens_of(limited) == tokens_of(expected(1, budgets=budgets))


def test_two_replicas_draw_within_a_constraint_what_one_engine_draws(two: tuple[ReplicaEngine, Weights]) -> None:
    engine, weights = two
    trie = TokenTrie.of([[1, 2, 3], [1, 4], [5, 6, 1, 2], [3, 3, 0]])  # 0, which stops, ends one of them
    weights.table = table_of(1)
    engine.refresh()
    try:
        drawn = engine.generate(PROMPTS, KEYS, OPTIONS, constraint=trie)
    finally:
        weights.table = table_of(0)
        engine.refresh()
    assert drawn_alike(drawn, expected(1, constraint=trie))
    assert len({one.token_ids for group in drawn for one in group}) > 2


def drawn_alike(some: Sequence[Sequence[Completion]], others: Sequence[Sequence[Completion]]) -> bool:
    return tokens_of(some) == tokens_of(others) and all(one.finish_reason == "stop" for group in some for one in group)


def test_interrupted_samples_go_on_elsewhere_under_other_weights_with_their_own_draws(
    two: tuple[ReplicaEngine, Weights],
) -> None:
    engine, weights = two
    weights.table = table_of(1)
    engine.publish(2)
    engine.serve(2)
    prompts = [prompt for prompt, keys in zip(PROMPTS, KEYS, strict=True) for _ in keys]
    keys = [key for group in KEYS for key in group]
    seen = threading.Event()
    first: dict[int, SampledTokens] = {}
    for one in engine.draw(prompts, keys, [0] * 18, [40] * 18, OPTIONS, stop=seen.is_set):
        first[one.request] = one
        seen.set()
    begun = {i: one for i, one in first.items() if one.finish_reason == "interrupted" and one.token_ids}
    assert len(first) == 18
    assert begun, "nothing was interrupted in the middle"
    weights.table = table_of(2)
    engine.publish(3)
    engine.serve(3)
    rest = sorted(begun)
    second = {
        rest[one.request]: one
        for one in engine.draw(
            [(*prompts[i], *begun[i].token_ids) for i in rest],
            [keys[i] for i in rest],
            [len(begun[i].token_ids) for i in rest],
            [40 - len(begun[i].token_ids) for i in rest],
            OPTIONS,
        )
    }
    for i in rest:
        whole = (*begun[i].token_ids, *second[i].token_ids)
        assert whole == by_hand(prompts[i], keys[i], [1] * len(begun[i].token_ids) + [2] * len(second[i].token_ids))
        assert second[i].weight_version == 3
        assert second[i].finish_reason == ("stop" if whole[-1] == 0 else "length")


def by_hand(prompt: Sequence[int], key: int, seeds: Sequence[int]) -> tuple[int, ...]:
    """Token t from the table of `seeds[t]` with draw t of the key, one at a time."""
    from rft_core.keyed_random import uniforms

    found: list[int] = []
    for place, seed in enumerate(seeds):
        logits = FakeDecodableModel(table_of(seed), carry=CARRY).logits_after([*prompt, *found])
        cumulative = logits.double().softmax(-1).cumsum(0)
        found.append(int(torch.searchsorted(cumulative, uniforms([key], 1, place)[0, 0], right=True)))
    return tuple(found)


@pytest.mark.parametrize("trouble", ["die", "hang", "stop"])
@pytest.mark.timeout(60)
def test_what_a_dead_replica_had_is_drawn_again_to_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    bad = {"trouble": trouble, "trouble_at": 5, "marker": str(tmp_path / "was"), "pause": 0.01}
    monkeypatch.setattr(ReplicaProcess, "hang_limits", HangLimits(stopped=1.5, asleep=2.5))
    # the deadline alone would come ten minutes later
    engine = pool(tmp_path, Weights(), [bad, {"pause": 0.01}], ReplicaLimits())
    try:
        drawn = engine.generate(PROMPTS, KEYS, OPTIONS)
        assert (tmp_path / "was").exists()
        assert tokens_of(drawn) == tokens_of(expected(0))
        counters = engine.counters()
        assert counters["engine/restarts"] == 1
        assert counters["engine/reissued"] >= 1
        assert engine._health.wait(0, lambda: False), "it comes back beside the other one"  # pyright: ignore
        assert tokens_of(engine.generate(PROMPTS, KEYS, OPTIONS)) == tokens_of(expected(0)), "both are there again"
        assert engine.counters()["engine/restarts"] == 0
    finally:
        engine.close()


class Dying:
    """A replica that dies of every sample with key 102, and of nothing else."""

    number, can_resume, reads_files, facts = 0, True, False, EngineFacts("float32", VOCAB, True, "file")
    lives = 0

    def load(self, snapshot: WeightSnapshot) -> None:
        """Nothing is held."""

    def draw(self, call: SampleRequests) -> Iterator[SampledTokens]:
        for request, key in enumerate(call.keys):
            if key == 102:
                raise EngineDied(code="engine.died", what="gone", where="log 0.log", why="", do="")
            yield SampledTokens(request, (0,), (-1.0,), (0.0,), "stop", 0)

    def interrupt(self) -> None:
        """It ends by itself."""

    def restart(self, newest: Callable[[], WeightSnapshot]) -> None:
        self.lives += 1

    def sleep(self, level: int) -> None:
        """Nothing to give up."""

    def wake(self) -> None:
        """Nothing to bring back."""

    def close(self) -> None:
        """Nothing to end."""


def test_samples_that_every_replica_dies_of_end_the_run() -> None:
    replicas = [Dying(), Dying()]
    engine = ReplicaEngine(replicas, SharedWeightStore(Weights().provider, torch.float32, num_bytes=1000), max_len=64)
    engine.refresh()
    assert len(engine.generate(PROMPTS[:1], KEYS[:1], OPTIONS)[0]) == 3, "keys 0 to 2"
    with pytest.raises(ServiceError, match=r"\d+ samples were given to 3 engine replicas, and each") as caught:
        engine.generate(PROMPTS, KEYS, OPTIONS)
    assert caught.value.problem.code == "engine.replicas.die"
    assert "0.log" in caught.value.problem.where
    # begun, not ended: a replica that was lost twice in a row pauses before it starts again
    assert engine.counters()["engine/restarts"] == 2
    engine.close()


class Forgetful(Dying):
    """A replica that ends its calls without a result for the last request; `mends`: until it is restarted."""

    def __init__(self, *, mends: bool) -> None:
        self.mends = mends

    def draw(self, call: SampleRequests) -> Iterator[SampledTokens]:
        num = len(call.keys) if self.mends and self.lives else len(call.keys) - 1
        for request in range(num):
            yield SampledTokens(request, (0,), (-1.0,), (0.0,), "stop", 0)


@pytest.mark.timeout(30)
def test_a_replica_that_leaves_a_request_out_is_started_again_and_the_request_is_drawn() -> None:
    replicas = [Forgetful(mends=True), Forgetful(mends=True)]
    engine = ReplicaEngine(replicas, SharedWeightStore(Weights().provider, torch.float32, num_bytes=1000), max_len=64)
    engine.refresh()
    assert tokens_of(engine.generate(PROMPTS, KEYS, OPTIONS)) == [[(0,)] * 3] * 6
    counters = engine.counters()
    assert counters["engine/reissued"] >= 2
    assert counters["engine/restarts"] == 2
    engine.close()


@pytest.mark.timeout(30)
def test_a_request_that_every_replica_leaves_out_ends_the_run() -> None:
    replicas = [Forgetful(mends=False), Forgetful(mends=False)]
    engine = ReplicaEngine(replicas, SharedWeightStore(Weights().provider, torch.float32, num_bytes=1000), max_len=64)
    engine.refresh()
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, OPTIONS)
    assert caught.value.problem.code == "engine.replicas.die"
    assert isinstance(caught.value.__cause__, ServiceError)
    assert caught.value.__cause__.problem.code == "engine.garbage"
    engine.close()


class Refusing(Dying):
    """A replica that refuses weights while `faults` are left; it draws under the version that it holds."""

    faults, version, num_loads = 0, 0, 0

    def load(self, snapshot: WeightSnapshot) -> None:
        self.num_loads += 1
        if self.faults:
            self.faults -= 1
            raise ServiceError(code="engine.logprob_parity", what="other weights", where="", why="", do="")
        self.version = snapshot.version

    def draw(self, call: SampleRequests) -> Iterator[SampledTokens]:
        for request in range(len(call.keys)):
            yield SampledTokens(request, (0,), (-1.0,), (0.0,), "stop", self.version)


def test_a_load_that_failed_can_be_repeated_under_its_version() -> None:
    replicas = [Refusing(), Refusing()]
    engine = ReplicaEngine(replicas, SharedWeightStore(Weights().provider, torch.float32, num_bytes=1000), max_len=64)
    engine.load_weights(1)
    engine.sleep(2)
    engine.wake()
    replicas[1].faults = 1
    with pytest.raises(ServiceError) as caught:
        engine.load_weights(2)
    assert caught.value.problem.code == "engine.logprob_parity"
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, OPTIONS)
    assert caught.value.problem.code == "engine.state", "level 2 gave the weights up, and none were loaded"
    engine.load_weights(2)
    drawn = engine.generate(PROMPTS, KEYS, OPTIONS)
    assert {one.weight_version for group in drawn for one in group} == {2}
    num_loads = replicas[0].num_loads
    for version in (2, 1):
        with pytest.raises(ServiceError) as caught:
            engine.load_weights(version)
        assert caught.value.problem.code == "engine.weights.not_newer"
    engine.close()
    for ask in (engine.refresh, lambda: engine.load_weights(3)):
        with pytest.raises(ServiceError) as caught:
            ask()
        assert caught.value.problem.code == "engine.state"
    assert replicas[0].num_loads == num_loads, "refused before anything moves"


def test_versions_that_no_replica_will_load_again_leave_the_shared_memory() -> None:
    weight_store = SharedWeightStore(Weights().provider, torch.float32, num_bytes=1000)
    engine = ReplicaEngine([Dying()], weight_store, max_len=64)
    engine.refresh()
    paths = {0: weight_store.get(0).path}
    for version in (1, 2, 3):
        engine.publish(version)
        paths[version] = weight_store.get(version).path
    assert weight_store.versions == [0, 1, 2, 3], "published ones stay until they are served"
    engine.serve(2)
    assert weight_store.versions == [2, 3]
    assert [path.exists() for path in paths.values()] == [False, False, True, True]
    engine.load_weights(4)
    assert weight_store.versions == [4]
    assert not any(path.exists() for path in paths.values())
    engine.close()


def test_weights_of_another_model_are_refused(two: tuple[ReplicaEngine, Weights]) -> None:
    engine, weights = two
    weights.table = torch.zeros(3, 3)
    engine.publish(4)
    engine.serve(4)
    with pytest.raises(RftError, match="table") as caught:
        engine.generate(PROMPTS, KEYS, OPTIONS)
    assert caught.value.problem.code == "engine.weights.incomplete"


def test_the_store_keeps_versions_until_they_are_dropped() -> None:
    weights = Weights()
    weight_store = SharedWeightStore(weights.provider, torch.bfloat16, num_bytes=1000)
    for version in range(3):
        weights.table = table_of(version)
        weight_store.put(version)
    paths = {version: weight_store.get(version).path for version in weight_store.versions}
    [(name, held)] = weight_store.get(1).tensors()
    assert name == "table"
    assert torch.equal(held, table_of(1).to(torch.bfloat16))
    weight_store.drop_below(2)
    assert weight_store.versions == [2]
    assert [paths[version].exists() for version in range(3)] == [False, False, True]
    weight_store.close()
    assert not paths[2].exists()


def call_of(prefixes: Sequence[Sequence[int]], budgets: Sequence[int]) -> SampleRequests:
    num = len(prefixes)
    options = SamplingOptions(temperature=1.0, max_new_tokens=max(budgets))
    return SampleRequests(prefixes, list(range(num)), [0] * num, budgets, options)


def test_dealing_is_balanced_whole_and_the_same_every_time() -> None:
    prefixes = [(i,) for i in range(8) for _ in range(4)]
    budgets = [10 * (1 + i % 3) for i in range(8) for _ in range(4)]
    call = call_of(prefixes, budgets)
    for num in (1, 2, 3, 5):
        shares = assign_samples(call, num)
        assert sorted(request for share in shares for request in share) == list(range(32))
        loads = [sum(budgets[request] for request in share) for share in shares]
        assert max(loads) <= 4 / 3 * max(sum(loads) / num, 120), loads
        assert shares == assign_samples(call, num)
    groups = [[prefixes[request] for request in share] for share in assign_samples(call, 2)]
    assert not set(groups[0]) & set(groups[1]), "samples of one prompt stay together"
    assert sorted(len(share) for share in assign_samples(call_of([(1,)] * 6, [5] * 6), 2)) == [3, 3]


@pytest.mark.parametrize("max_len", [64, 43])
def test_an_engine_that_resumes_draws_what_one_call_draws(max_len: int) -> None:
    """In pieces of any length, every sample is the one that `generate` draws; also where no token more would fit."""
    model = FakeDecodableModel(table_of(0), carry=CARRY)
    engine = ResumableEngine(model, max_rows=5, max_len=max_len)
    prompts = [prompt for prompt, keys in zip(PROMPTS, KEYS, strict=True) for _ in keys]
    keys = [key for group in KEYS for key in group]
    drawn: list[list[int]] = [[] for _ in keys]
    open_ones, rounds = list(range(18)), 0
    while open_ones:
        rounds += 1
        options = SamplingOptions(temperature=1.0, max_new_tokens=40, stop_token_ids=(0,))
        call = SampleRequests(
            [(*prompts[i], *drawn[i]) for i in open_ones],
            [keys[i] for i in open_ones],
            [len(drawn[i]) for i in open_ones],
            [40 - len(drawn[i]) for i in open_ones],
            options,
        )
        looks = iter(range(1000))
        limit = rounds
        ended = []
        for one in engine.draw(call, lambda looks=looks, limit=limit: next(looks) > limit):
            drawn[open_ones[one.request]] += one.token_ids
            ended += [] if one.finish_reason == "interrupted" else [open_ones[one.request]]
        open_ones = [i for i in open_ones if i not in ended]
    assert rounds > 2
    flat = [one.token_ids for group in expected(0) for one in group]
    assert [tuple(row) for row in drawn] == flat
    assert max(flat, key=len)[-1] in range(VOCAB)
