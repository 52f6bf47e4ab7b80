"""Several engines as one, over replicas in this process: what reaches them, in which order, and the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError, RftError, ServiceError
from rft_engine.completions import Completion
from rft_engine.engine_base import EngineFacts
from rft_engine.lifecycle import EngineState
from rft_engine.native.partial_requests import SampledTokens, SampleRequests
from rft_engine.process.client import EngineDied
from rft_engine.replicas import engine as module
from rft_engine.replicas import health
from rft_engine.replicas.engine import ReplicaEngine
from rft_engine.testing.replica_worker import FakeMedia
from rft_engine.weight_sync.shared_memory import SharedWeightStore, WeightSnapshot

VOCAB = 7
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PAUSE_SECONDS", (0.0, 0.0, 0.0))


OPTIONS = SamplingOptions(temperature=1.0, max_new_tokens=5, stop_token_ids=(0,))


class Recording:
    """A replica that keeps what it is asked, and draws for a sample its start and its key."""

    def __init__(self, log: list[Any], number: int = 0, *, resumes: bool = True, reads_files: bool = False) -> None:
        self.log, self.number, self.can_resume, self.reads_files = log, number, resumes, reads_files
        self.facts = EngineFacts("float32", VOCAB + number, True, "file")
        self.calls: list[SampleRequests] = []
        self.version = -1
        self.fault: RftError | None = None

    def load(self, snapshot: WeightSnapshot) -> None:
        self.log.append(("load", self.number, snapshot.version))
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.version = snapshot.version

    def draw(self, call: SampleRequests) -> Iterator[SampledTokens]:
        self.calls.append(call)
        for request, (start, key) in enumerate(zip(call.starts, call.keys, strict=True)):
            reason = "stop" if key % 2 else "interrupted" if start else "length"
            yield SampledTokens(request, (start, key), (-1.0, -0.1 * key), (0.0, -0.5), reason, self.version)

    def interrupt(self) -> None:
        """It ends by itself."""

    def restart(self, newest: Callable[[], WeightSnapshot]) -> None:
        self.log.append(("restart", self.number, newest().version))

    def sleep(self, level: int) -> None:
        self.log.append(("sleep", self.number, level))

    def wake(self) -> None:
        self.log.append(("wake", self.number))

    def close(self) -> None:
        self.log.append(("close", self.number))


class Store(SharedWeightStore):
    """A store that keeps the versions put and dropped, and its closing, in a log of all."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__(_tensors, torch.float32, num_bytes=100)
        self.log = log

    def put(self, version: int) -> WeightSnapshot:
        self.log.append(("put", version))
        return super().put(version)

    def drop_below(self, version: int) -> None:
        self.log.append(("drop_below", version))
        super().drop_below(version)

    def close(self) -> None:
        self.log.append(("close store",))
        super().close()


def _tensors() -> Iterator[tuple[str, Tensor]]:
    yield "w", torch.zeros(2)


class Made:
    """An engine of two such replicas and the log of all that they and the store are asked."""

    def __init__(self, num: int = 2, **facts: bool) -> None:
        self.log: list[Any] = []
        self.replicas = [Recording(self.log, number, **facts) for number in range(num)]
        self.engine = ReplicaEngine(self.replicas, Store(self.log), max_len=20)

    def taken(self) -> list[Any]:
        """The log since the last call of this method."""
        found, self.log[:] = list(self.log), []
        return found


@pytest.fixture
def made() -> Iterator[Made]:
    one = Made()
    yield one
    one.engine.close()


@pytest.fixture
def ready(made: Made) -> Made:
    made.engine.refresh()
    made.taken()
    return made


def loads(version: int) -> list[Any]:
    return [("put", version), ("drop_below", version), ("load", 0, version), ("load", 1, version)]


def in_order(entries: Sequence[Any]) -> list[Any]:
    """The entries with loads, which happen at once, behind the others and by replica."""
    return [one for one in entries if one[0] != "load"] + sorted(one for one in entries if one[0] == "load")


def test_weights_are_put_served_and_loaded_into_every_replica(made: Made) -> None:
    engine = made.engine
    assert (engine.weight_version, engine.max_len) == (0, 20)
    assert engine.facts == made.replicas[0].facts
    engine.refresh()
    assert in_order(made.taken()) == loads(0)
    engine.load_weights(2)
    assert in_order(made.taken()) == loads(2)
    assert engine.weight_version == 2
    engine.refresh()
    assert in_order(made.taken()) == loads(2)
    for version in (2, 1):
        with pytest.raises(ServiceError) as caught:
            engine.load_weights(version)
        assert caught.value.problem.code == "engine.weights.not_newer"
    assert made.taken() == []
    engine.publish(3)
    assert (made.taken(), engine.weight_version) == ([("put", 3)], 2)
    engine.serve(3)
    assert (made.taken(), engine.weight_version) == ([("drop_below", 3)], 3)
    with pytest.raises(AssertionError):
        engine.serve(4)
    assert engine.weight_version == 3
    engine.close()
    made.taken()
    for ask in (engine.refresh, lambda: engine.load_weights(9)):
        with pytest.raises(ServiceError) as caught:
            ask()
        assert caught.value.problem.code == "engine.state"
    assert made.taken() == []


@pytest.mark.parametrize("ask", ["refresh", "load_weights"])
def test_weights_come_back_after_level_2_and_then_it_generates(ready: Made, ask: str) -> None:
    engine = ready.engine
    engine.sleep(2)
    engine.wake()
    with pytest.raises(ServiceError) as caught:
        engine.generate([[1]], [[1]], OPTIONS)
    assert caught.value.problem.code == "engine.state"
    engine.refresh() if ask == "refresh" else engine.load_weights(1)
    [[one]] = engine.generate([[1]], [[1]], OPTIONS)
    assert one.weight_version == (0 if ask == "refresh" else 1)


def test_a_replica_that_is_gone_during_a_load_is_restarted_with_the_weights(ready: Made) -> None:
    ready.replicas[1].fault = EngineDied(code="engine.died", what="", where="", why="", do="")
    ready.engine.load_weights(1)
    entries = ready.taken()
    assert sorted(entries[-3:]) == [("load", 0, 1), ("load", 1, 1), ("restart", 1, 1)]
    assert ready.engine.counters()["engine/restarts"] == 1
    ready.engine.generate([[1], [2]], [[1], [2]], OPTIONS)
    assert ready.taken() == [("load", 1, 1)], "the other holds the version"
    ready.engine.generate([[1], [2]], [[1], [2]], OPTIONS)
    assert ready.taken() == [], "both hold it"
    fault = ServiceError(code="engine.logprob_parity", what="", where="", why="", do="")
    ready.replicas[1].fault = fault
    with pytest.raises(ServiceError) as caught:
        ready.engine.load_weights(2)
    assert caught.value is fault
    assert ready.engine.counters()["engine/restarts"] == 0
    ready.taken()
    ready.engine.generate([[1], [2]], [[1], [2]], OPTIONS)
    assert ready.taken() == [("load", 1, 2)], "only the one whose load failed"


def test_a_replica_that_did_not_start_is_started_beside_the_one_that_did() -> None:
    log: list[Any] = []
    replicas, told = [Recording(log, number) for number in range(2)], list[str]()
    fault = EngineDied(code="engine.died", what="no memory", where="log 0", why="", do="")
    engine = ReplicaEngine(replicas, Store(log), max_len=20, lost={0: fault}, notify=told.append)
    try:
        assert engine.facts == replicas[1].facts
        engine.refresh()
        assert engine._health.wait(0, lambda: False, 20.0)  # pyright: ignore[reportPrivateUsage]
        assert ("restart", 0, 0) in log
        assert ("load", 1, 0) in log
        assert "no memory" in told[0]
        assert engine.counters()["engine/restarts"] == 1
        assert len(engine.generate([[1], [2]], [[1], [2]], OPTIONS)) == 2
        assert [len(replica.calls) for replica in replicas] == [1, 1]
    finally:
        engine.close()


def test_without_the_replicas_that_are_given_up_the_others_draw_everything() -> None:
    made = Made(3)
    try:
        made.engine.refresh()

        def fails(newest: Callable[[], WeightSnapshot]) -> None:
            raise EngineDied(code="engine.died", what="gone again", where="log", why="", do="")

        made.replicas[1].restart = fails  # type: ignore[method-assign]
        made.replicas[1].fault = EngineDied(code="engine.died", what="gone", where="log", why="", do="")
        made.engine.load_weights(1)
        assert not made.engine._health.wait(1, lambda: False, 20.0)  # pyright: ignore[reportPrivateUsage]
        assert len(made.engine.generate(PROMPTS, KEYS, OPTIONS)) == 3
        made.engine.load_weights(2)
        made.engine.sleep()
        made.engine.wake()
        assert not made.replicas[1].calls
        assert [entry for entry in made.taken() if entry[:2] == ("load", 1)] == [("load", 1, 0), ("load", 1, 1)]
    finally:
        made.engine.close()


def test_a_replica_that_died_between_two_calls_is_found_when_it_is_put_to_sleep(ready: Made) -> None:
    def gone(level: int) -> None:
        raise EngineDied(code="engine.died", what="gone", where="log", why="", do="")

    ready.replicas[0].sleep = gone  # type: ignore[method-assign]
    ready.engine.sleep()
    ready.engine.wake()
    assert ready.engine._health.wait(0, lambda: False, 20.0)  # pyright: ignore[reportPrivateUsage]
    assert {("sleep", 1, 1), ("restart", 0, 0)} <= set(ready.taken())
    assert ready.engine.counters()["engine/restarts"] == 1


def test_sleep_wake_and_close_reach_each_replica_once(ready: Made) -> None:
    engine = ready.engine
    engine.wake()
    engine.sleep()
    engine.sleep()
    assert (ready.taken(), engine.state) == ([("sleep", 0, 1), ("sleep", 1, 1)], EngineState.ASLEEP)
    engine.wake()
    engine.wake()
    assert (ready.taken(), engine.state) == ([("wake", 0), ("wake", 1)], EngineState.READY)
    engine.sleep(2)
    assert ready.taken() == [("sleep", 0, 2), ("sleep", 1, 2)]
    closed: list[int] = []
    engine._images.close = lambda: closed.append(1)  # type: ignore[method-assign]  # pyright: ignore
    engine.close()
    engine.close()
    assert ready.taken() == [("close", 0), ("close", 1), ("close store",)]
    assert (engine.state, closed) == (EngineState.CLOSED, [1])


PROMPTS, KEYS = [(1,), (2, 3), (4,)], [[10, 11], [13], [14, 16]]


def test_completions_come_in_the_order_of_prompts_and_keys(ready: Made) -> None:
    found = ready.engine.generate(PROMPTS, KEYS, OPTIONS)
    assert found == [
        [
            Completion((0, key), (-1.0, -0.1 * key), (0.0, -0.5), "stop" if key % 2 else "length", 0)
            for key in prompt_keys
        ]
        for prompt_keys in KEYS
    ]
    for replica in ready.replicas:
        [call] = replica.calls
        assert set(call.budgets) == {5}
        assert call.options == OPTIONS
        assert (call.media, call.shown) == ([], [])
    assert ready.engine.generate([[1], [2]], [[], []], OPTIONS) == [[], []]


def test_budgets_reach_the_replicas_and_the_largest_is_that_of_the_call(ready: Made) -> None:
    ready.engine.generate(PROMPTS, KEYS, OPTIONS, budgets=[[1, 2], [4], [3, 1]])
    given = {
        key: budget
        for replica in ready.replicas
        for key, budget in zip(replica.calls[0].keys, replica.calls[0].budgets, strict=True)
    }
    assert given == {10: 1, 11: 2, 13: 4, 14: 3, 16: 1}
    assert {replica.calls[0].options.max_new_tokens for replica in ready.replicas} == {
        max(replica.calls[0].budgets) for replica in ready.replicas
    }


@pytest.mark.parametrize(
    ("prompts", "keys", "given", "code"),
    [
        ([[1]], [[1]], {"constraint": TokenTrie.of([[1] * 6])}, "engine.constraint.budget"),
        ([[1], [2]], [[1], [2]], {"media": [None]}, "engine.media"),
        ([[1] * 16], [[1]], {}, "engine.prompt_too_long"),
        ([[VOCAB]], [[1]], {}, "engine.unknown_token"),
        ([[1] * 16], [[]], {}, "engine.prompt_too_long"),
        ([[1], [2]], [[1]], {}, "engine.sample_keys"),
        ([[1]], [[1]], {"budgets": [[6]]}, "engine.budgets"),
    ],
)
def test_what_no_replica_could_generate_is_refused(
    ready: Made, prompts: Any, keys: Any, given: dict[str, Any], code: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        ready.engine.generate(prompts, keys, OPTIONS, **given)
    assert caught.value.problem.code == code
    assert not any(replica.calls for replica in ready.replicas)
    ready.engine.generate([[1] * 15], [[1]], OPTIONS)


def test_a_constraint_reaches_every_replica_and_what_is_outside_of_it_is_refused(ready: Made) -> None:
    # the double draws the start of a sample, 0, and its key
    free = SamplingOptions(temperature=1.0, max_new_tokens=5)
    inside = TokenTrie.of([[0, 1], [0, 3], [0, 5]])
    found = ready.engine.generate([(1,), (2,), (3,)], [[1], [3], [5]], free, constraint=inside)
    assert [one.token_ids for [one] in found] == [(0, 1), (0, 3), (0, 5)]
    assert [replica.calls[0].constraint for replica in ready.replicas] == [inside] * 2
    with pytest.raises(ServiceError) as caught:
        ready.engine.generate([(1,)], [[6]], free, constraint=inside)
    assert caught.value.problem.code == "engine.constraint.not_whole"
    with pytest.raises(OptionsError) as refused:
        list(ready.engine.draw([(1, 0)], [1], [1], [2], free, constraint=inside))
    assert refused.value.problem.code == "engine.draw_constrained"


def test_what_no_replica_could_draw_is_refused(ready: Made) -> None:
    draw = ready.engine.draw
    for fields, media, code in (
        (([[1]], [1], [0], [20]), None, "engine.prompt_too_long"),
        (([[1]], [1], [1], [2]), None, "engine.draw_request"),
        (([[1]], [1], [0], [2]), [None, None], "engine.media"),
    ):
        with pytest.raises(OptionsError) as caught:
            list(draw(*fields, OPTIONS, media=media))
        assert caught.value.problem.code == code
    assert list(draw([], [], [], [], OPTIONS)) == []
    ready.engine.sleep()
    with pytest.raises(ServiceError) as refused:
        list(draw([[1]], [1], [0], [2], OPTIONS))
    assert refused.value.problem.code == "engine.state"


@pytest.mark.parametrize("resumes", [True, False])
def test_samples_that_were_begun_need_replicas_that_resume(resumes: bool) -> None:
    made = Made(resumes=resumes)
    asked: list[int] = []
    try:
        engine = made.engine
        engine.refresh()
        assert engine.can_resume is resumes
        whole = list(engine.draw([[1], [2]], [4, 5], [0, 0], [9, 9], OPTIONS, stop=lambda: bool(asked.append(1))))
        assert len(whole) == 2
        assert bool(asked) is resumes, "what draws to the end has nothing to be stopped"
        assert {replica.calls[0].options.max_new_tokens for replica in made.replicas} == {9}
        if resumes:
            begun = list(engine.draw([[1, 2], [2]], [4, 5], [1, 0], [9, 9], OPTIONS))
            assert {one.request: one.token_ids for one in begun} == {0: (1, 4), 1: (0, 5)}
        else:
            with pytest.raises(OptionsError) as caught:
                list(engine.draw([[1, 2], [2]], [4, 5], [1, 0], [9, 9], OPTIONS))
            assert caught.value.problem.code == "engine.cannot_resume"
    finally:
        made.engine.close()


@pytest.mark.parametrize("reads_files", [True, False])
def test_images_go_through_files_only_where_a_replica_reads_them(reads_files: bool) -> None:
    made = Made(1, reads_files=reads_files)
    try:
        made.engine.refresh()
        media = [FakeMedia.of(3), None, FakeMedia.of(3)]
        made.engine.generate(PROMPTS, KEYS, OPTIONS, media=media)
        [call] = made.replicas[0].calls
        assert call.media == [0, 0, -1, 0, 0]
        assert [one.media for one in call.shown] == [FakeMedia.of(3)]
        [plain] = [one.plain for one in call.shown]
        assert [image["digest"] for image in plain.get("images", ())] == (["digest-3"] if reads_files else [])
        paths = [Path(image["path"]) for image in plain.get("images", ())]
        assert all(path.exists() for path in paths)
    finally:
        made.engine.close()
    assert not any(path.exists() for path in paths)


def test_before_a_call_there_is_nothing_to_count(ready: Made) -> None:
    for _ in range(2):
        found = ready.engine.counters()
        assert found == {"engine/reissued": 0, "engine/restarts": 0, "time/engine_idle_share": 0.0}


def test_figures_of_a_call_and_the_share_of_idle_time(ready: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ready.engine
    times = count(100.0, 2.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(times)))

    class Run:
        """A dispatch that worked for 1.5 of 2 x 2 seconds."""

        busy_seconds = (1.0, 0.5)
        num_reissued = 3

        def __init__(self, *given: Any) -> None:
            self.call: SampleRequests = given[2]

        def results(self) -> Iterator[SampledTokens]:
            for request in range(len(self.call.keys)):
                yield SampledTokens(request, (1, 2), (-1.0, -1.0), (0.0, 0.0), "length", 0)

    monkeypatch.setattr(module, "ReplicaDispatch", Run)
    engine.generate(PROMPTS, KEYS, OPTIONS)
    assert (engine.stats().num_generated_tokens, engine.stats().seconds) == (10, 6.0)
    for calls in (1, 2):
        if calls == 2:
            engine.generate(PROMPTS, KEYS, OPTIONS)
            engine.generate(PROMPTS, KEYS, OPTIONS)
        assert engine.counters() == {
            "engine/reissued": 3 * calls,
            "engine/restarts": 0,
            "time/engine_idle_share": pytest.approx(1.0 - 1.5 / 4.0),
        }
    Run.busy_seconds = (9.0, 9.0)
    engine.generate(PROMPTS, KEYS, OPTIONS)
    assert engine.counters()["time/engine_idle_share"] == 0.0
    assert engine.counters()["engine/reissued"] == 0
