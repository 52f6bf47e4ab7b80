"""One call over replicas that follow a script: what each is asked, who draws what was lost, and how a call ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import ServiceError
from rft_engine.engine_base import EngineFacts
from rft_engine.native.partial_requests import SampledTokens, SampleRequests
from rft_engine.process.client import EngineDied
from rft_engine.replicas import dispatch as module
from rft_engine.replicas import health as health_module
from rft_engine.replicas.dispatch import ReplicaDispatch
from rft_engine.replicas.health import ReplicaHealth
from rft_engine.weight_sync.shared_memory import WeightSnapshot

VERSION = 3
WEIGHTS = WeightSnapshot(VERSION, Path("weights"), {}, 0)
PATIENCE = 20.0
pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def _waits_are_for_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAIT_SECONDS", 600.0)
    monkeypatch.setattr(health_module, "_PAUSE_SECONDS", (0.0, 0.0, 0.0))


def died() -> EngineDied:
    return EngineDied(code="engine.died", what="gone", where="log", why="", do="")


class Scripted:
    """A replica that draws the key of each request; `meets(self, key)` is called before each."""

    number, can_resume, reads_files = 0, True, False
    facts = EngineFacts("float32", 7, True, "file")

    def __init__(self, meets: Callable[[Scripted, int], None] | None = None) -> None:
        self.meets = meets or (lambda replica, key: None)
        self.asked: list[tuple[str, object]] = []
        self.interrupted = threading.Event()
        self.may_restart = threading.Event()
        self.may_restart.set()

    def load(self, snapshot: WeightSnapshot) -> None:
        self.asked.append(("load", snapshot.version))

    def draw(self, call: SampleRequests) -> Iterator[SampledTokens]:
        self.asked.append(("draw", list(call.keys)))
        for request, key in enumerate(call.keys):
            self.meets(self, key)
            reason = "interrupted" if self.interrupted.is_set() else "length"
            yield SampledTokens(request, (key,), (-1.0,), (0.0,), reason, VERSION)

    def interrupt(self) -> None:
        self.interrupted.set()

    def restart(self, newest: Callable[[], WeightSnapshot]) -> None:
        self.asked.append(("restart", newest().version))
        assert self.may_restart.wait(PATIENCE)

    def sleep(self, level: int) -> None:
        """Nothing to give up."""

    def wake(self) -> None:
        """Nothing to bring back."""

    def close(self) -> None:
        """Nothing to end."""


def call_of(num: int) -> SampleRequests:
    """Requests of as many prompts with the keys 10, 11, ...; each replica gets every second one."""
    options = SamplingOptions(temperature=1.0, max_new_tokens=5)
    return SampleRequests([(i,) for i in range(num)], range(10, 10 + num), [0] * num, [5] * num, options)


def dispatch_of(
    replicas: Sequence[Scripted],
    num: int,
    stop: Callable[[], bool] | None = None,
    versions: list[int | None] | None = None,
) -> ReplicaDispatch:
    health = ReplicaHealth(replicas, versions)
    health.weights = WEIGHTS
    return ReplicaDispatch(replicas, health, call_of(num), WEIGHTS, stop)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("replica-")]


def by_request(results: Iterator[SampledTokens]) -> list[tuple[tuple[int, ...], str]]:
    found = {one.request: one for one in results}
    assert {one.weight_version for one in found.values()} == {VERSION}
    return [(found[request].token_ids, found[request].finish_reason) for request in range(len(found))]


def whole(num: int) -> list[tuple[tuple[int, ...], str]]:
    return [((10 + request,), "length") for request in range(num)]


def test_each_replica_is_loaded_where_it_must_be_and_draws_its_share() -> None:
    replicas = [Scripted(), Scripted()]
    versions: list[int | None] = [VERSION - 1, VERSION]
    run = dispatch_of(replicas, 5, versions=versions)
    assert by_request(run.results()) == whole(5)
    assert replicas[0].asked == [("load", VERSION), ("draw", [10, 12, 14])]
    assert replicas[1].asked == [("draw", [11, 13])]
    assert versions == [VERSION] * 2
    assert (run.num_reissued, run.health.taken_restarts()) == (0, 0)
    assert threads() == []
    assert all(replica.interrupted.is_set() for replica in replicas), "whatever is under way ends with the call"


def test_the_time_of_every_share_counts_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    times = count(100.0, 2.5)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    met: list[int] = []

    def dies_once(replica: Scripted, key: int) -> None:
        met.append(key)
        if met == [10, 11]:
            raise died()

    run = dispatch_of([Scripted(dies_once)], 4)
    assert by_request(run.results()) == whole(4)
    assert run.busy_seconds == [5.0]
    assert dispatch_of([Scripted(), Scripted()], 2).busy_seconds == [0.0, 0.0]


def test_a_replica_that_died_is_restarted_and_draws_what_it_had_left() -> None:
    lives: list[int] = []

    def dies_twice(replica: Scripted, key: int) -> None:
        if key == 12 and len(lives) < 2:
            lives.append(key)
            raise died()

    replica = Scripted(dies_twice)
    versions: list[int | None] = [None]
    run = dispatch_of([replica], 4, versions=versions)
    assert by_request(run.results()) == whole(4)
    assert replica.asked == [
        ("load", VERSION),
        ("draw", [10, 11, 12, 13]),
        ("restart", VERSION),
        ("load", VERSION),
        ("draw", [12, 13]),
        ("restart", VERSION),
        ("load", VERSION),
        ("draw", [12, 13]),
    ]
    assert (run.num_reissued, run.health.taken_restarts(), versions) == (4, 2, [VERSION])


def test_a_request_is_given_to_three_replicas_at_most() -> None:
    def dies(replica: Scripted, key: int) -> None:
        if key == 12:
            raise died()

    replica = Scripted(dies)
    versions: list[int | None] = [None]
    run = dispatch_of([replica], 4, versions=versions)
    with pytest.raises(ServiceError) as caught:
        list(run.results())
    assert caught.value.problem.code == "engine.replicas.die"
    assert [name for name, _ in replica.asked].count("draw") == 3
    assert (run.health.taken_restarts(), run.num_reissued) == (2, 4)
    assert threads() == []


def test_another_replica_draws_while_the_lost_one_starts_again() -> None:
    first_died, others_done = threading.Event(), threading.Event()

    def dies(replica: Scripted, key: int) -> None:
        if key == 12:
            first_died.set()
            raise died()

    def waits(replica: Scripted, key: int) -> None:
        # what the first one had comes only after this share is done: the second replica waits for it
        assert key == 11 or first_died.wait(PATIENCE)
        if key == 14:
            others_done.set()

    lost, other = Scripted(dies), Scripted(waits)
    lost.may_restart = others_done
    run = dispatch_of([lost, other], 5)
    assert by_request(run.results()) == whole(5)
    assert lost.asked[:3] == [("load", VERSION), ("draw", [10, 12, 14]), ("restart", VERSION)]
    assert other.asked == [("load", VERSION), ("draw", [11, 13]), ("draw", [12, 14])]
    assert (run.num_reissued, run.health.taken_restarts()) == (2, 1)


def test_a_stop_is_asked_for_until_it_is_true_and_interrupts_every_replica() -> None:
    def waits(replica: Scripted, key: int) -> None:
        assert key < 12 or replica.interrupted.wait(PATIENCE)

    answers: list[bool] = []

    def stop() -> bool:
        answers.append(len(answers) == 2)
        return answers[-1]

    replicas = [Scripted(waits), Scripted(waits)]
    found = by_request(dispatch_of(replicas, 6, stop).results())
    assert found[2:] == [((10 + request,), "interrupted") for request in range(2, 6)]
    assert answers == [False, False, True]
    assert threads() == []


def test_requests_that_nobody_has_when_a_call_stops_are_answered_without_tokens() -> None:
    def dies(replica: Scripted, key: int) -> None:
        if key == 11:
            raise died()

    replica = Scripted(dies)
    replica.may_restart = threading.Event()

    def stop() -> bool:
        is_starting = replica.asked[-1:] == [("restart", VERSION)]
        if is_starting:
            replica.may_restart.set()
        return is_starting

    found = by_request(dispatch_of([replica], 3, stop).results())
    assert found == [((10,), "length"), ((), "interrupted"), ((), "interrupted")]
    assert replica.asked[1:] == [("draw", [10, 11, 12]), ("restart", VERSION)]


def test_requests_of_a_replica_that_dies_while_a_call_ends_are_answered_without_tokens() -> None:
    def dies(replica: Scripted, key: int) -> None:
        if key == 11:
            assert replica.interrupted.wait(PATIENCE)
            raise died()

    replica = Scripted(dies)
    run = dispatch_of([replica], 3, lambda: bool(replica.asked))
    found = by_request(run.results())
    assert found[1:] == [((), "interrupted"), ((), "interrupted")]
    assert run.num_reissued == 2
    assert [name for name, _ in replica.asked].count("draw") == 1


@pytest.mark.parametrize("error", [ServiceError(code="x", what="", where="", why="", do=""), KeyError("y")])
def test_any_other_error_of_a_replica_reaches_the_caller(error: Exception) -> None:
    def fails(replica: Scripted, key: int) -> None:
        if key == 10:
            raise error
        assert replica.interrupted.wait(PATIENCE)

    replicas = [Scripted(fails), Scripted(fails)]
    with pytest.raises(type(error)) as caught:
        list(dispatch_of(replicas, 4).results())
    assert caught.value is error
    assert threads() == []
    assert [name for name, _ in replicas[0].asked] == ["load", "draw"], "it is not started again"


def test_a_caller_that_leaves_early_leaves_no_replica_at_work() -> None:
    def waits(replica: Scripted, key: int) -> None:
        assert key == 10 or replica.interrupted.wait(PATIENCE)

    replicas = [Scripted(waits), Scripted(waits)]
    results: Any = dispatch_of(replicas, 6).results()
    assert next(results).request == 0
    assert len(threads()) == 2
    results.close()
    assert threads() == []


def test_replicas_are_done_with_the_last_result_although_nothing_more_is_asked_for() -> None:
    met = threading.Event()

    def waits(replica: Scripted, key: int) -> None:
        assert key != 10 or met.wait(PATIENCE)

    results = dispatch_of([Scripted(waits), Scripted()], 2).results()
    assert next(results).request == 1
    meanwhile = threads()
    met.set()
    assert next(results).request == 0
    for thread in meanwhile:
        thread.join(PATIENCE)
    assert threads() == []
    assert list(results) == []


def test_a_load_that_fails_leaves_no_version_behind() -> None:
    class Refusing(Scripted):
        def load(self, snapshot: WeightSnapshot) -> None:
            raise ServiceError(code="engine.weights.incomplete", what="", where="", why="", do="")

    versions: list[int | None] = [VERSION - 1]
    with pytest.raises(ServiceError) as caught:
        list(dispatch_of([Refusing()], 1, versions=versions).results())
    assert caught.value.problem.code == "engine.weights.incomplete"
    assert versions == [None]


def test_a_call_that_ends_without_all_results_loses_those_that_are_missing() -> None:
    class Forgetful(Scripted):
        def draw(self, call: SampleRequests) -> Iterator[SampledTokens]:
            yield from list(super().draw(call))[:2]

    replica = Forgetful()
    run = dispatch_of([replica], 5)
    assert by_request(run.results()) == whole(5)
    assert [keys for name, keys in replica.asked if name == "draw"] == [[10, 11, 12, 13, 14], [12, 13, 14], [14]]
    assert (run.num_reissued, run.health.taken_restarts()) == (4, 2)


def test_requests_are_drawn_by_one_that_comes_back_when_all_others_are_given_up() -> None:
    may_die = threading.Event()

    def dies(replica: Scripted, key: int) -> None:
        may_die.set()  # not before: the other one has no share of its own, whoever is faster
        raise died()

    class Broken(Scripted):
        def restart(self, newest: Callable[[], WeightSnapshot]) -> None:
            raise died()

    back, broken = Scripted(), Broken(dies)
    back.may_restart = may_die
    run = dispatch_of([back, broken], 3)
    run.health.lost(0, died())
    assert run.health.ready == [1]
    assert by_request(run.results()) == whole(3)
    assert not run.health.wait(1, lambda: False)
    assert back.asked[-1] == ("draw", [10, 11, 12])


def test_a_call_ends_when_all_replicas_are_given_up() -> None:
    class Broken(Scripted):
        def restart(self, newest: Callable[[], WeightSnapshot]) -> None:
            raise died()

    def dies(replica: Scripted, key: int) -> None:
        raise died()

    run = dispatch_of([Broken(dies), Broken(dies)], 4)
    with pytest.raises(ServiceError) as caught:
        list(run.results())
    assert caught.value.problem.code == "engine.replicas.gone"
    assert threads() == []
