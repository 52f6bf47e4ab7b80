"""An engine that asks for weights alone is refused by name, and never leaves other ranks in half an exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rft_core.errors import ServiceError
from rft_engine.weight_sync.collective_provider import CollectiveLoadEngine, CollectiveWeightProvider

NAMES = ("a", "b", "c")


class Rank:
    """Whole tensors that exist once all ranks have asked for them: an exchange, and how far this rank has come."""

    def __init__(self, barrier: threading.Barrier | None = None) -> None:
        self.barrier = barrier
        self.exchanges: list[str] = []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in NAMES:
            if self.barrier is not None:
                self.barrier.wait(timeout=20)
            self.exchanges.append(name)
            yield name, torch.zeros(1)


class Engine:
    """Loads what it is given; `dies` says at which tensor the first pass breaks off."""

    def __init__(self, weights: Callable[[], Iterator[tuple[str, Tensor]]], dies: str = "") -> None:
        self.weights, self.dies = weights, dies
        self.loaded: list[str] = []
        self.weight_version = 0

    def load_weights(self, version: int) -> None:
        try:
            self._pull()
        except EOFError:  # as the engine in a process does: once more, into another process
            self._pull()
        self.weight_version = version

    def generate(self) -> None:
        """Its process is gone: the weights have to come again."""
        self._pull()

    def _pull(self) -> None:
        for name, _ in self.weights():
            if name == self.dies:
                self.dies = ""
                raise EOFError
            self.loaded.append(name)


def make(rank: Rank, dies: str = "") -> tuple[CollectiveLoadEngine, Engine]:
    weights = CollectiveWeightProvider(rank.tensors, rank=1)
    engine = Engine(weights, dies)
    return CollectiveLoadEngine(engine, weights), engine


def test_weights_come_in_a_call_of_all_ranks_and_everything_else_is_the_engine() -> None:
    rank = Rank()
    together, engine = make(rank)
    together.load_weights(3)
    assert engine.loaded == rank.exchanges == list(NAMES)
    assert together.weight_version == 3
    together.load_weights(4)
    assert rank.exchanges == [*NAMES, *NAMES]


def test_a_restart_while_the_other_ranks_generate_is_refused_by_name_and_without_an_exchange() -> None:
    rank = Rank()
    together, _ = make(rank)
    together.load_weights(1)
    with pytest.raises(ServiceError) as caught:
        together.generate()
    assert caught.value.problem.code == "engine.alone"
    assert "rank 1" in str(caught.value)
    assert rank.exchanges == list(NAMES)


@pytest.mark.parametrize("dies", NAMES)
def test_a_rank_that_breaks_off_makes_the_exchanges_of_its_pass_to_the_end(dies: str) -> None:
    """Two ranks: the engine of one dies at a tensor, and the other has all of them and waits for nobody."""
    barrier = threading.Barrier(2)
    broken, sound = Rank(barrier), Rank(barrier)
    ends: list[Exception | None] = []

    def other() -> None:
        make(sound)[0].load_weights(1)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        make(broken, dies)[0].load_weights(1)
    except ServiceError as error:
        ends.append(error)
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert [error.problem.code for error in ends if isinstance(error, ServiceError)] == ["engine.alone"]
    assert broken.exchanges == sound.exchanges == list(NAMES)


def test_an_engine_that_fails_before_it_asks_takes_part_all_the_same() -> None:
    rank = Rank()
    weights = CollectiveWeightProvider(rank.tensors, rank=0)

    class Refuses:
        def load_weights(self, version: int) -> None:
            raise ValueError(version)

    with pytest.raises(ValueError, match="7"):
        CollectiveLoadEngine(Refuses(), weights).load_weights(7)
    assert rank.exchanges == list(NAMES)


def test_weights_are_given_in_calls_of_all_ranks_alone() -> None:
    rank = Rank()
    weights = CollectiveWeightProvider(rank.tensors, rank=1)
    asked: list[str] = []

    class Asks:
        def refresh(self) -> None:
            asked.extend(name for name, _ in weights())

        def load_weights(self, version: int) -> None:
            """It asks for nothing."""

    engine = CollectiveLoadEngine(Asks(), weights)
    for call in (lambda: None, engine.refresh, lambda: engine.load_weights(1)):
        call()
        with pytest.raises(ServiceError) as caught:
            weights()
        assert caught.value.problem.code == "engine.alone"
    assert asked == list(NAMES)
    assert rank.exchanges == [*NAMES, *NAMES]
