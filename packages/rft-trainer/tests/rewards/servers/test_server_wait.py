"""The wait for a server: its clock, its words, its end; with doubles of clock and sleep."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rft_core.errors import ExitCode, OutageError
from rft_trainer.rewards.servers.circuit_breaker import Backoff
from rft_trainer.rewards.servers.server_wait import ServerWait, StillAway, WaitRules


@dataclass(slots=True)
class Clock:
    now: float = 100.0
    slept: list[float] = field(default_factory=list[float])
    on_sleep: Callable[[], object] = list

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.on_sleep()


def wait_of(clock: Clock, seconds: float = 50.0, **options: Any) -> ServerWait:
    backoff = Backoff(options.pop("jitter", lambda: 0.0))
    moments = {"clock": lambda: clock.now, "wall_clock": lambda: clock.now, "sleep": clock.sleep}
    rules = WaitRules(seconds, **moments, backoff=backoff, **options)
    return ServerWait("the reward server x", "--remote_rm_url http://x", rules)


def pause_lengths(clock: Clock, wait: ServerWait, count: int) -> list[float]:
    lengths: list[float] = []
    for number in range(count):
        before = clock.now
        wait.pause("refused", number)
        lengths.append(clock.now - before)
    return lengths


def test_pauses_double_up_to_a_limit_and_are_slept_in_pieces() -> None:
    clock = Clock()
    assert pause_lengths(clock, wait_of(clock, 1000.0), 7) == pytest.approx([1, 2, 4, 8, 16, 30, 30])
    assert max(clock.slept) <= 0.2


@pytest.mark.parametrize(("asked", "slept"), [(7.0, 7.0), (0.0, 0.05), (1e9, 50.0)])
def test_what_the_server_asks_for_is_honoured_as_far_as_the_wait_goes(asked: float, slept: float) -> None:
    clock = Clock()
    wait_of(clock).pause("429", 0, asked)
    assert clock.now - 100.0 == pytest.approx(slept)


def test_the_last_try_is_at_the_end_of_the_time_and_then_the_run_ends() -> None:
    clock = Clock()
    wait = wait_of(clock, 2.5)
    assert pause_lengths(clock, wait, 2) == pytest.approx([1.0, 1.5])
    with pytest.raises(OutageError) as caught:
        wait.pause("refused by http://x", 2)
    problem = caught.value.problem
    assert caught.value.exit_code is ExitCode.OUTAGE
    assert (problem.code, problem.where) == ("reward.outage", "--remote_rm_url http://x")
    assert "refused by http://x" in problem.what


def test_an_answer_to_anyone_begins_the_clock_anew_and_ends_the_pause_of_others() -> None:
    clock = Clock()
    wait = wait_of(clock, 3.0)
    wait.pause("refused", 1)
    wait.answered()
    wait.pause("refused", 1)
    clock.on_sleep = wait.answered
    before = clock.now
    wait.pause("refused", 3)
    assert clock.now - before == pytest.approx(0.2)
    assert wait.answered_after(before)
    assert not wait.answered_after(clock.now)


def test_a_run_that_goes_on_waits_once_an_outage() -> None:
    clock = Clock()
    wait = wait_of(clock, 1.0, goes_on=True)
    wait.pause("refused", 0)
    for _ in range(2):
        with pytest.raises(StillAway):
            wait.pause("refused", 0)
    assert clock.now == pytest.approx(101.0), "the others do not wait again"
    wait.answered()
    wait.pause("refused", 0)
    assert clock.now == pytest.approx(102.0)


@pytest.mark.parametrize("how", ["a signal", "close"])
def test_a_wait_ends_when_the_run_is_to_stop(how: str) -> None:
    clock, asked = Clock(), list[bool]()
    wait = wait_of(clock, stopped=lambda: bool(asked))
    clock.on_sleep = wait.close if how == "close" else (lambda: asked.append(True))
    with pytest.raises(OutageError) as caught:
        wait.pause("refused", 5)
    assert caught.value.problem.code == "reward.wait_interrupted"
    assert len(clock.slept) == 1


def test_it_is_said_once_then_rarely_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    wait = wait_of(clock, 2000.0)
    with caplog.at_level(logging.WARNING):
        while clock.now < 1500.0:
            wait.pause("refused", 4)
        assert len(caplog.records) == 4, "at once, after 1 and 5 minutes, then every 10"
        assert "--reward_wait 2000" in caplog.text
        wait.answered()
        wait.answered()
    assert len(caplog.records) == 5


def test_after_a_few_failures_one_request_at_a_time_is_sent() -> None:
    now, lock, tries = [0.0], threading.Lock(), list[float]()

    def ask() -> None:
        with contextlib.suppress(StillAway):
            wait.begin()
            for number in range(100):
                with lock:
                    tries.append(now[0])
                wait.pause("refused", number)

    moments = {"clock": lambda: now[0], "wall_clock": lambda: now[0], "sleep": lambda seconds: time.sleep(0.0005)}
    rules = WaitRules(40.0, goes_on=True, backoff=Backoff(lambda: 0.0), **moments)
    wait = ServerWait("the reward server x", "--remote_rm_url http://x", rules)
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.001)
        now[0] += 0.25
    # the first of each thread, then one a pause of 1, 2, 4, 8, 16 and the rest of 40 s, whatever the number of threads
    assert len(tries) <= 8 + 8
    assert len([moment for moment in tries if moment > 2.0]) <= 7


def test_requests_that_begin_in_an_outage_wait_for_its_end_and_after_it_are_told_so() -> None:
    clock = Clock()
    wait = wait_of(clock, 5.0, goes_on=True)
    wait.begin()
    for number in range(5):
        wait.pause("refused", 0 if number < 4 else 1)
    clock.now += 60.0
    with pytest.raises(StillAway):
        wait.pause("refused", 5)
    wait_began = clock.now
    with pytest.raises(StillAway):
        wait.begin()
    assert clock.now == wait_began, "nobody waits once the time is over"
    clock.now += 30.0
    wait.begin()
    wait.answered()
    wait.begin()
    assert clock.now == wait_began + 30.0


def test_a_thread_that_gives_up_does_not_keep_the_others_from_trying() -> None:
    clock = Clock()
    wait = wait_of(clock, 500.0)
    for _ in range(5):
        wait.pause("refused", 0)
    wait.gave_up()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (wait.begin(), done.set()))
    thread.start()
    assert done.wait(20)
    thread.join()
