"""Calls that are ended after some seconds: the late one alone, in its own thread, and with an error of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from rft_models.tokenization import time_limit
from rft_models.tokenization.time_limit import call_within

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "_LOOK_SECONDS", 0.01)


def endless() -> None:
    while True:
        pass


def stubborn() -> Iterator[int]:
    """Keeps every `Exception` that it meets."""
    while True:
        try:
            yield 1
        except Exception:  # noqa: BLE001 - as a template's environment might
            continue


def test_a_call_that_ends_gives_its_result_or_raises_its_own_error() -> None:
    assert call_within(30.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        call_within(30.0, lambda: 1 / 0)


@pytest.mark.parametrize("call", [endless, lambda: sum(stubborn())])
def test_a_call_without_end_is_ended(call: object) -> None:
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        call_within(0.05, call)  # type: ignore[arg-type]
    assert call_within(30.0, lambda: 4) == 4, "the next one is not"


def test_only_the_thread_of_the_late_call_is_interrupted() -> None:
    results: list[object] = []

    def late() -> None:
        try:
            call_within(0.05, endless)
        except TimeoutError as error:
            results.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    call_within(30.0, thread.join)
    assert len(results) == 1


def test_nothing_is_raised_after_a_call() -> None:
    results = [call_within(0.02, partial(int, number)) for number in range(20)]
    until, interrupted = time.monotonic() + 0.1, False
    try:
        while time.monotonic() < until:
            pass
    except TimeoutError:
        interrupted = True
    assert (results, interrupted) == (list(range(20)), False)


def test_a_forked_child_has_limits_too() -> None:
    call_within(30.0, lambda: None)
    child = os.fork()
    if not child:
        try:
            call_within(0.05, endless)
        except TimeoutError:
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_call_during_which_the_process_grows_too_much_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "_MOST_BYTES", 64 << 20)
    kept: list[bytes] = []

    def grow() -> None:
        while len(kept) < 4096:
            kept.append(b"x" * (1 << 20))

    with pytest.raises(MemoryError, match="more than 64 MiB"):
        call_within(60.0, grow)
    assert len(kept) < 4096
    kept.clear()
    assert call_within(60.0, lambda: 5) == 5


def test_where_the_system_tells_no_memory_none_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert time_limit._resident_bytes() > 1 << 20
    monkeypatch.setattr(time_limit, "_STATM", "/nowhere")
    assert time_limit._resident_bytes() == 0
