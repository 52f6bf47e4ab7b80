"""Results of the ranks of a save, errors included, through a store in memory."""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from rft_core.errors import CheckpointError, DataError, PeerError, RftError, StorageError
from rft_dist.checkpoints import rank_exchange
from rft_dist.checkpoints.rank_exchange import StoreExchange, collective_call
from rft_dist.collectives import SingleProcess
from rft_dist.testing.checkpoint_ranks import ThreadExchange, run_ranks


def store(seconds: float = 5.0) -> HashStore:
    made = HashStore()
    made.set_timeout(timedelta(seconds=seconds))
    return made


def test_bytes_come_in_the_order_of_the_ranks_each_time() -> None:
    shared = store()

    def work(ranks: ThreadExchange) -> list[list[bytes]]:
        exchange = StoreExchange(shared, ranks.rank, 3)
        return [exchange.gather_bytes(f"{number} of {ranks.rank}".encode()) for number in range(3)]

    expected = [[f"{number} of {rank}".encode() for rank in range(3)] for number in range(3)]
    assert run_ranks(3, work) == [expected] * 3
    assert shared.check(["2/0", "2/1", "2/2"])
    assert not any(shared.check([f"{number}/{rank}"]) for number in range(2) for rank in range(3)), "what was read goes"


def test_the_first_rank_that_does_not_come_is_named() -> None:
    shared = store(0.05)
    shared.set("0/0", b"a")
    with pytest.raises(PeerError) as caught:
        StoreExchange(shared, 2, 3, 0.05).gather_bytes(b"c")
    problem = caught.value.problem
    assert problem.code == "checkpoint.peer_missing"
    assert problem.what.startswith("rank 1 ")
    assert "#1" in problem.what
    assert problem.where == "rank 2 of 3"


def test_floats_of_the_results_keep_their_bits() -> None:
    # a NaN with a payload, -0.0, the smallest number, and one that decimal digits hold
    bits = [0x7FF80000DEADBEEF, 0x8000000000000000, 0x1, 0x3FB999999999999A]
    sent = [struct.unpack("<d", struct.pack("<Q", one))[0] for one in bits]
    found = run_ranks(2, lambda exchange: collective_call(exchange, lambda: {"bytes": 7, "seconds": sent}))
    for of_rank in found:
        for answer in of_rank:
            assert [struct.unpack("<Q", struct.pack("<d", one))[0] for one in answer["seconds"]] == bits
            assert answer["bytes"] == 7


def test_a_channel_of_its_own_waits_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made, told = HashStore(), list[timedelta]()

    class Client:
        def set_timeout(self, limit: timedelta) -> None:
            told.append(limit)

    names: list[str] = []
    monkeypatch.setattr(rank_exchange, "another_client", lambda ranks, values: Client())
    monkeypatch.setattr(rank_exchange, "PrefixStore", lambda name, store: (names.append(name), made)[1])
    ranks = SingleProcess()
    first, second = StoreExchange.beside(ranks, 7.0), StoreExchange.beside(ranks)
    assert told == [timedelta(seconds=7.0), timedelta(seconds=600.0)]
    assert len(set(names)) == 2
    assert (first.rank, first.world_size) == (0, 1)
    assert second.gather_bytes(b"x") == [b"x"]


def outcomes(*works: Any) -> list[Any]:
    return run_ranks(len(works), lambda exchange: collective_call(exchange, works[exchange.rank]))


def test_results_of_all_ranks_come_to_all() -> None:
    assert outcomes(lambda: {"a": 1}, lambda: None, lambda: [2]) == [[{"a": 1}, None, [2]]] * 3
    assert collective_call(SingleProcess(), lambda: object) == [object]


def fail(error: Exception) -> Any:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize("kind", [CheckpointError, StorageError, PeerError])
def test_an_error_of_one_rank_is_raised_by_all_under_its_class(kind: type[RftError]) -> None:
    error = kind(code="a.b", what="w", where="here", why="y", do="d")
    first, second, third = outcomes(lambda: 1, fail(error), lambda: 3)
    assert second is error
    for found in (first, third):
        assert type(found) is kind
        assert found.problem.where == "rank 1: here"
        assert (found.problem.code, found.problem.do) == ("a.b", "d")


@pytest.mark.parametrize("error", [ValueError("x" * 400), DataError(code="a.b", what="w", where="h", why="y")])
def test_another_error_is_one_of_a_peer_elsewhere(error: Exception) -> None:
    first, second = outcomes(fail(error), lambda: 1)
    assert first is error
    assert type(second) is PeerError
    assert second.problem.code == "checkpoint.rank_failed"
    assert second.problem.what.startswith(f"rank 0 failed while saving: {type(error).__name__}: ")
    assert second.problem.what.count("x") <= 300
    assert second.problem.do == "read logs/rank_0.log"


def test_of_several_errors_each_rank_raises_its_own_and_others_that_of_the_lowest() -> None:
    errors = [CheckpointError(code=f"a.{number}", what="w", where="h", why="y") for number in range(2)]
    found = outcomes(lambda: 0, fail(errors[0]), fail(errors[1]))
    assert found[0].problem.code == "a.0"
    assert found[1:] == errors
