"""Lost replicas: started again beside the others a few times, then given up; what is told, and when a run ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rft_core.errors import DataError, ServiceError
from rft_engine.process.client import EngineDied
from rft_engine.replicas import health as module
from rft_engine.replicas.health import MOST_RESTARTS, ReplicaHealth
from rft_engine.weight_sync.shared_memory import WeightSnapshot

PATIENCE = 20.0
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", (0.0, 0.0, 0.0))


def died(what: str = "gone") -> EngineDied:
    return EngineDied(code="engine.died", what=what, where="log r.log, which ends: Killed", why="", do="")


def weights(version: int) -> WeightSnapshot:
    return WeightSnapshot(version, Path("weights"), {}, 0)


class Failing:
    """A replica whose restarts fail as often as `faults` says, with these errors."""

    def __init__(self, number: int, *faults: Exception) -> None:
        self.number, self.faults = number, list(faults)
        self.loaded: list[int] = []
        self.may_start = threading.Event()
        self.may_start.set()

    def restart(self, newest: Callable[[], WeightSnapshot]) -> None:
        self.loaded.append(newest().version)
        assert self.may_start.wait(PATIENCE)
        if self.faults:
            raise self.faults.pop(0)


class Made:
    """The health of such replicas, with weights, and what it told."""

    def __init__(self, *replicas: Failing) -> None:
        self.told: list[str] = []
        self.health = ReplicaHealth(replicas, notify=self.told.append)
        self.health.weights = weights(5)

    def lose(self, index: int) -> bool:
        """Lose a replica, and return whether it came back."""
        self.health.lost(index, died())
        return self.health.wait(index, lambda: False, PATIENCE)


def test_a_replica_whose_restarts_fail_is_tried_again_and_comes_back() -> None:
    made = Made(Failing(0, died("not yet"), DataError(code="x", what="no file", where="", why="")), Failing(1))
    assert made.lose(0)
    assert made.health.replicas[0].loaded == [5, 5, 5]  # type: ignore[attr-defined]  # pyright: ignore
    assert made.health.versions == [None, None], "it is loaded before it draws"
    assert (made.health.ready, made.health.remaining, made.health.taken_restarts()) == ([0, 1], [0, 1], 3)
    assert [text.split(":")[0] for text in made.told] == ["engine replica 0 is lost"] * 3 + ["engine replica 0 is back"]
    assert "r.log" in made.told[0]
    assert made.health.taken_restarts() == 0


def test_a_replica_that_cannot_be_started_is_given_up_and_the_other_goes_on() -> None:
    made = Made(Failing(0, *[died()] * 9), Failing(1))
    assert not made.lose(0)
    assert len(made.health.replicas[0].loaded) == MOST_RESTARTS  # type: ignore[attr-defined]  # pyright: ignore
    assert (made.health.ready, made.health.remaining) == ([1], [1])
    made.health.require_one()
    assert made.health.all_gone is None
    assert f"given up after {MOST_RESTARTS} restarts" in made.told[-1]


def test_losses_count_in_a_row_and_a_share_that_was_finished_begins_anew() -> None:
    made = Made(Failing(0))
    for _ in range(MOST_RESTARTS):
        assert made.lose(0)
    made.health.worked(0)
    for _ in range(MOST_RESTARTS):
        assert made.lose(0)
    assert not made.lose(0)


def test_the_error_of_a_run_without_replicas_names_each_with_the_end_of_its_log() -> None:
    made = Made(Failing(4, *[died("out of memory")] * 3), Failing(5, *[KeyError("y")] * 3))
    assert not made.lose(0)
    assert not made.lose(1)
    with pytest.raises(ServiceError) as caught:
        made.health.require_one()
    problem = caught.value.problem
    assert problem.code == "engine.replicas.gone"
    for words in ("all 2", "replica 4: out of memory", "replica 5", "KeyError"):
        assert words in problem.what
    assert "replica 4: log r.log, which ends: Killed" in problem.where
    assert isinstance(made.health.all_gone, ServiceError)


def test_whoever_needs_a_replica_waits_for_one_that_starts() -> None:
    replica = Failing(0)
    replica.may_start.clear()
    made = Made(replica)
    made.health.lost(0, died())
    assert (made.health.ready, made.health.remaining) == ([], [0])
    assert not made.health.wait(0, lambda: True), "over"
    assert not made.health.wait(0, lambda: False, 0.01)
    waiting = threading.Thread(target=made.health.require_one)
    waiting.start()
    replica.may_start.set()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert made.health.ready == [0]


def test_a_restart_with_weights_that_were_replaced_meanwhile_is_no_fault_and_is_made_again() -> None:
    replica = Failing(0, died("the file is gone"))
    replica.may_start.clear()
    made = Made(replica)
    made.health.lost(0, died())
    while not replica.loaded:
        made.health.wait(0, lambda: False, 0.01)
    made.health.weights = weights(6)
    replica.may_start.set()
    assert made.health.wait(0, lambda: False, PATIENCE)
    assert (replica.loaded, made.health.versions, made.health.taken_restarts()) == ([5, 6], [None], 1)


def test_after_the_end_nothing_is_started_and_what_was_just_starting_is_ended_too() -> None:
    replica = Failing(0, died())
    replica.may_start.clear()
    made = Made(replica)
    made.health.lost(0, died())
    while not replica.loaded:
        made.health.wait(0, lambda: False, 0.01)
    ends: list[int] = []

    def end() -> None:
        ends.append(len(replica.loaded))
        replica.may_start.set()  # as one that waits for its process sees that it was ended

    made.health.close(end)
    assert ends == [1, 1]
    made.health.lost(0, died())
    assert (replica.loaded, made.health.taken_restarts()) == ([5], 1)
