"""Preparing ahead changes nothing but when the work is done."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_core.errors import OptionsError
from rft_trainer.data.prefetch import AUTOMATIC, Prefetcher


@given(st.lists(st.lists(st.integers(), max_size=4), max_size=12), st.integers(-1, 3), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_order_and_content_are_those_of_working_inline(
    batches: list[list[int]], num_workers: int, prefetch_factor: int
) -> None:
    def prepare(batch: list[int]) -> list[str]:
        return [f"<{value}>" for value in batch]

    with Prefetcher(batches, prepare, num_workers=num_workers, prefetch_factor=prefetch_factor) as prepared:
        assert list(prepared) == [prepare(batch) for batch in batches]


def test_batches_come_in_order_when_the_first_takes_longest() -> None:
    later_done = threading.Event()

    def prepare(batch: int) -> int:
        if batch == 0:
            assert later_done.wait(10)
        if batch == 1:
            later_done.set()
        return batch

    with Prefetcher(range(4), prepare, num_workers=2, prefetch_factor=1) as prepared:
        assert list(prepared) == [0, 1, 2, 3]


@pytest.mark.parametrize(("num_workers", "prefetch_factor", "ahead"), [(0, 4, 1), (1, 1, 1), (2, 3, 6)])
def test_batches_are_taken_in_the_consumers_thread_and_no_further_ahead_than_asked(
    num_workers: int, prefetch_factor: int, ahead: int
) -> None:
    taken: list[int] = []
    threads: set[int] = set()

    def source() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            threads.add(threading.get_ident())
            yield number

    with Prefetcher(
        source(), lambda batch: batch, num_workers=num_workers, prefetch_factor=prefetch_factor
    ) as prepared:
        for expected in range(3):
            assert next(prepared) == expected
            assert len(taken) == expected + ahead
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_preparing_comes_in_the_place_of_its_batch(num_workers: int) -> None:
    def prepare(batch: int) -> float:
        return 1 / batch

    with Prefetcher([1, 2, 0, 4], prepare, num_workers=num_workers) as prepared:
        assert [next(prepared), next(prepared)] == [1.0, 0.5]
        with pytest.raises(ZeroDivisionError):
            next(prepared)
        assert next(prepared) == 0.25


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_source_is_raised(num_workers: int) -> None:
    def source() -> Iterator[int]:
        yield 1
        raise KeyError("gone")

    with Prefetcher(source(), lambda batch: batch, num_workers=num_workers) as prepared, pytest.raises(KeyError):
        list(prepared)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_closing_ends_the_threads_and_the_iteration(num_workers: int) -> None:
    before = threading.active_count()
    prepared = Prefetcher(iter(range(50)), lambda batch: batch, num_workers=num_workers)
    assert next(prepared) == 0
    prepared.close()
    prepared.close()
    assert list(prepared) == []
    assert threading.active_count() == before


@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(-2, 2), (1, 0)])
def test_counts_that_make_no_sense_are_refused(num_workers: int, prefetch_factor: int) -> None:
    with pytest.raises(OptionsError):
        Prefetcher([], lambda batch: batch, num_workers=num_workers, prefetch_factor=prefetch_factor)


class Clock:
    """A clock that moves by what a test says; threads do not touch it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.consumer = threading.get_ident()

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        """Let time pass, unless a thread beside the consumer's works."""
        if threading.get_ident() == self.consumer:
            self.now += seconds


def waited(preparing: float, stepping: float, monkeypatch: pytest.MonkeyPatch, cores: int = 8) -> tuple[float, int]:
    """Seconds that 100 steps waited for batches that are prepared in so many, and the threads that did it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    clock = Clock()

    def prepare(batch: int) -> int:
        clock.spend(preparing)
        return batch

    with Prefetcher(range(100), prepare, num_workers=AUTOMATIC, prefetch_factor=1, clock=clock) as prepared:
        waits = 0.0
        for expected in range(100):
            before = clock.now
            assert next(prepared) == expected
            waits += clock.now - before
            clock.spend(stepping)
        most = prepared._max_pending
    return waits, most


def test_threads_begin_where_steps_wait_and_cut_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, threads = waited(0.05, 0.02, monkeypatch)
    assert threads == 3, "0.05 s of preparation keep up with steps of 0.02 s by three"
    assert waits < 0.2 * 100 * 0.05, "less than a fifth of what all of them would wait"
    assert waited(0.05, 0.02, monkeypatch, cores=2)[1] == 2
    assert waited(0.05, 0.0, monkeypatch)[1] == 8


@pytest.mark.parametrize(("preparing", "stepping"), [(0.002, 0.1), (0.001, 0.001), (0.0, 0.0)])
def test_no_thread_begins_where_steps_hardly_wait(
    preparing: float, stepping: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waited(preparing, stepping, monkeypatch)[1] == 0
