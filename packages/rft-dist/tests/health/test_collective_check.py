"""Collectives are compared with those of rank 0: in the first steps, or all of them where that was asked for."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from rft_core.errors import PeerError
from rft_dist.health.activity import Activity, Call
from rft_dist.health.collective_check import FingerprintCheck

FIRST = Call(1, "sum", (3, 4), "float32", "loop.py:10 (step)")
OTHER = Call(1, "sum", (4, 3), "float32", "loop.py:10 (step)")


def check_of(store: HashStore, rank: int, *, steps: int, always: bool = False, done: int = 0) -> FingerprintCheck:
    activity = Activity()
    for _ in range(done):
        activity.end_step()
    return FingerprintCheck(store, activity, rank=rank, steps=steps, always=always)


@pytest.mark.parametrize(
    ("steps", "always", "done", "is_on"),
    [(2, False, 0, True), (2, False, 1, True), (2, False, 2, False), (0, False, 0, False), (0, True, 9, True)],
)
def test_it_is_on_in_the_first_steps_or_always(steps: int, always: bool, done: int, is_on: bool) -> None:
    store = HashStore()
    checks = [check_of(store, rank, steps=steps, always=always, done=done) for rank in (0, 1)]
    assert [check.is_on for check in checks] == [is_on, is_on]
    checks[0].compare(FIRST)
    if is_on:
        with pytest.raises(PeerError) as caught:
            checks[1].compare(OTHER)
        assert caught.value.problem.code == "collective.mismatch"
    else:
        checks[1].compare(OTHER)
        assert store.num_keys() == 0, "nothing is published either"


def test_equal_calls_pass_one_after_another() -> None:
    store = HashStore()
    first, second = (check_of(store, rank, steps=1) for rank in (0, 1))
    for number in (1, 2, 3):
        call = Call(number, "max", (), "int64", f"loop.py:{number} (step)")
        first.compare(call)
        second.compare(call)
        assert store.num_keys() == number, "rank 0 publishes each call, and the others only read it"
    with pytest.raises(PeerError):
        second.compare(replace(call, name="sum"))


def test_calls_that_every_rank_has_made_long_ago_are_taken_out_of_the_store() -> None:
    store = HashStore()
    first = check_of(store, 0, steps=1)
    for number in (1, 2, 3, 4096):
        first.compare(replace(FIRST, number=number))
    assert store.num_keys() == 4
    first.compare(replace(FIRST, number=4097))
    assert not store.check(["call/1"])
    assert store.check(["call/2", "call/3", "call/4096", "call/4097"])


def test_a_call_waits_for_that_of_the_first_rank_for_as_long_as_it_takes() -> None:
    waited: list[object] = []

    class Store:
        def wait(self, keys: list[str], limit: timedelta) -> None:
            waited.append((keys, limit))

        def get(self, key: str) -> bytes:
            assert key == "call/1"
            return b"sum\n3,4\nfloat32\nloop.py:10 (step)"

    check_of(Store(), 1, steps=1).compare(FIRST)  # type: ignore[arg-type]
    assert waited == [(["call/1"], timedelta(days=7))]
