"""Heartbeats through a store in memory: who is read when, what is new, and what a lost store leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from rft_dist.health.failure import Cause
from rft_dist.health.heartbeat import Status, no_heartbeat_yet
from rft_dist.health.heartbeat_store import HeartbeatClient


class Outlook:
    """Gives the status of a rank, a beat later each time."""

    def __init__(self, rank: int) -> None:
        self.rank, self.beat, self.ended = rank, 0, ""

    def status(self) -> Status:
        self.beat += 1
        first = no_heartbeat_yet(self.rank)
        return Status(
            **{name: getattr(first, name) for name in first.__slots__} | {"beat": self.beat, "ended": self.ended}
        )


class Reads:
    """A store that records which keys are asked for, and may break."""

    def __init__(self, store: Any) -> None:
        self.store, self.reads, self.broken = store, list[str](), ""

    def multi_get(self, keys: list[str]) -> Any:
        self.reads.extend(keys)
        return self.store.multi_get(keys)

    def __getattr__(self, name: str) -> Any:
        if self.broken:
            raise RuntimeError(self.broken)
        return getattr(self.store, name)


Make = Callable[..., HeartbeatClient]


@pytest.fixture
def make() -> Iterator[Make]:
    """Clients that end with the test."""
    made: list[HeartbeatClient] = []

    def client(store: Any, rank: int, world_size: int = 3, beat: float = 60.0, start: bool = True) -> HeartbeatClient:
        made.append(HeartbeatClient(store, Outlook(rank), rank=rank, world_size=world_size, beat=beat))
        if start:
            made[-1].start()
        return made[-1]

    yield client
    for client_ in made:
        if client_._thread.is_alive():
            client_.stop()


def test_ranks_see_one_another_once_each_has_spoken(make: Make) -> None:
    store = HashStore()
    first, second = make(store, 0, 2), make(store, 1, 2, start=False)
    assert first.read_everyone(5.0)
    assert set(first.seen) == {0}
    assert not first.has_all_heartbeats
    second.start()
    assert second.announce_now(5.0)
    assert first.read_everyone(5.0)
    assert first.has_all_heartbeats
    assert first.seen[1].status.rank == 1


def test_a_heartbeat_counts_from_when_it_was_first_read(make: Make) -> None:
    store = HashStore()
    first, second = make(store, 0, 2), make(store, 1, 2)
    assert second.announce_now(5.0)
    assert first.read_everyone(5.0)
    seen, read_at = first.seen[1], first.read_at[1]
    assert first.read_everyone(5.0)
    assert first.seen[1] is seen, "the same heartbeat again"
    assert first.read_at[1] > read_at
    assert second.announce_now(5.0)
    assert first.read_everyone(5.0)
    assert first.seen[1].at > seen.at
    assert first.seen[1].status.beat == seen.status.beat + 1


def exchanged(store: Reads, rank: int, prepare: Callable[[HeartbeatClient], object]) -> set[str]:
    """The ranks that one exchange reads."""
    client = HeartbeatClient(store, Outlook(rank), rank=rank, world_size=3, beat=60.0)  # type: ignore[arg-type]
    prepare(client)
    store.reads.clear()
    client._exchange()
    return {key.removeprefix("status/") for key in store.reads}


def test_the_first_rank_reads_all_and_the_others_it_alone_while_all_is_well() -> None:
    store = Reads(HashStore())
    clients = [HeartbeatClient(store, Outlook(rank), rank=rank, world_size=3, beat=60.0) for rank in range(3)]  # type: ignore[arg-type]
    for client in clients:
        client._publish()

    def knows_all(client: HeartbeatClient) -> None:
        client._read(range(3))

    def suspects(client: HeartbeatClient) -> None:
        client._read(range(3))
        client.reads_all = True

    def first_has_left(client: HeartbeatClient) -> None:
        clients[0]._outlook.ended = "finished"  # type: ignore[attr-defined]
        clients[0]._publish()
        client._read(range(3))

    assert exchanged(store, 0, knows_all) == {"0", "1", "2"}
    assert exchanged(store, 1, knows_all) == {"0"}
    assert exchanged(store, 1, lambda client: None) == {"0", "1", "2"}
    assert exchanged(store, 1, suspects) == {"0", "1", "2"}
    assert exchanged(store, 1, first_has_left) == {"0", "1", "2"}


def test_the_first_cause_is_kept_and_reaches_the_others_with_their_next_beat(make: Make) -> None:
    store = HashStore()
    first, second = make(store, 0, 2), make(store, 1, 2)
    one, two = Cause("late", 1, "first", ""), Cause("gone", 0, "second", "")
    assert first.publish(one, 5.0) == one
    assert second.publish(two, 5.0) == one
    third = HeartbeatClient(store, Outlook(1), rank=1, world_size=2, beat=60.0)
    third._exchange()
    assert third.cause == one
    third.cause = two
    third._exchange()
    assert third.cause == two, "what is known is not read again"


def test_a_cause_that_no_store_takes_is_one_s_own(make: Make) -> None:
    client = make(HashStore(), 0, start=False)
    own = Cause("late", 1, "own", "")
    assert client.publish(own, 0.01) == own
    assert not client.announce_now(0.01)


def test_ranks_that_know_the_cause_are_counted(make: Make) -> None:
    store = HashStore()
    clients = [make(store, rank, 3) for rank in range(3)]
    assert clients[0].num_acknowledged(5.0) == 0
    for number, client in enumerate(clients, start=1):
        client.acknowledge(5.0)
        assert clients[0].num_acknowledged(5.0) == number
    assert make(store, 0, start=False).num_acknowledged(0.01) == 0


@pytest.mark.parametrize(("text", "told"), [("broken\nmore", "broken"), ("", "no reason was given")])
def test_a_lost_store_is_told_and_nobody_waits_for_it(make: Make, text: str, told: str) -> None:
    store = Reads(HashStore())
    client = make(store, 0, beat=0.01)
    assert client.announce_now(5.0)
    if text:
        store.broken = text
    else:
        store.multi_get = None  # type: ignore[method-assign]

        def refuse(keys: list[str]) -> None:
            raise RuntimeError

        store.multi_get = refuse  # type: ignore[method-assign]
    client._thread.join(5.0)
    assert not client._thread.is_alive()
    assert client.lost == told
    assert not client.announce_now(5.0)
    done = threading.Event()
    client._operations.put((lambda: None, done))
    client._refuse_operations()
    assert done.is_set()


def test_an_answer_of_the_store_is_noted(make: Make) -> None:
    client = make(HashStore(), 0)
    before = client.answered
    assert client.announce_now(5.0)
    assert client.announce_now(5.0)
    assert client.answered > before
    other = make(HashStore(), 0, start=False)
    other.answered = 0.0
    other._exchange()
    assert other.answered > 0.0


def test_a_client_beats_again_and_again_until_it_is_stopped(make: Make) -> None:
    client = make(HashStore(), 0, beat=0.01)
    outlook: Any = client._outlook
    for _ in range(500):
        if outlook.beat >= 3:
            break
        threading.Event().wait(0.01)
    assert outlook.beat >= 3
    client.stop()
    assert not client._thread.is_alive()
    slow = make(HashStore(), 0)
    assert slow.announce_now(5.0)
    assert slow.announce_now(5.0)
    assert slow._outlook.beat == 3, "one beat of its own, and two that were asked for"  # type: ignore[attr-defined]
