"""What counts as hung: a process that is stopped, or asleep with work to do, or silent for much longer than before."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from rft_engine.process import hang_watch
from rft_engine.process.hang_watch import HangLimits, HangWatch

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process of this code, which prints a line when it begins."""
    made: list[subprocess.Popen[str]] = []

    def begin(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-c", f"print(flush=True)\n{code}"]
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert made[-1].stdout is not None
        made[-1].stdout.readline()
        return made[-1]

    yield begin
    for process in made:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # with its children
        process.communicate()


class Clock:
    """A clock that a test moves, and what the system tells of a process at each moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.states, self.ticks = ["S"], 0
        monkeypatch.setattr(hang_watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(hang_watch, "_states_and_ticks", lambda pid: (self.states, self.ticks))

    def looks(self, watch: HangWatch, num: int, ticks: int = 0, seconds: float = 1.0) -> list[str]:
        """Look so often, with as many ticks used and seconds passed before each."""
        found: list[str] = []
        for _ in range(num):
            self.now += seconds
            self.ticks += ticks
            found.append(watch.look())
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_stopped_process_is_hung_after_six_seconds_of_looking(clock: Clock) -> None:
    clock.states = ["S", "T"]
    watch = HangWatch(7, HangLimits())
    *before, last = clock.looks(watch, 6, ticks=9)
    assert before == [""] * 5
    assert "SIGSTOP" in last
    watch.received()
    assert clock.looks(watch, 1) == [""], "a message begins anew"


def test_a_process_without_processor_time_is_hung_only_where_that_is_asked_for(clock: Clock) -> None:
    assert set(clock.looks(HangWatch(7, HangLimits()), 900)) == {""}
    watch = HangWatch(7, HangLimits(asleep=7.0))
    # the first look has nothing to compare with
    found = clock.looks(watch, 8, ticks=1)
    assert found[:7] == [""] * 7
    assert "no processor time" in found[7]


@pytest.mark.parametrize(("states", "ticks"), [(["S"], 2), (["R"], 0), (["D"], 0), (["S", "R"], 0), ([], 0)])
def test_a_process_that_works_waits_for_a_disk_or_cannot_be_seen_is_left_alone(
    clock: Clock, states: list[str], ticks: int
) -> None:
    clock.states = states
    assert set(clock.looks(HangWatch(7, HangLimits(asleep=7.0)), 60, ticks=ticks)) == {""}


def test_silence_counts_against_the_longest_pause_of_the_call(clock: Clock) -> None:
    watch = HangWatch(7, HangLimits(least_silence=8.0))
    assert set(clock.looks(watch, 60, ticks=9)) == {""}, "the first message may take any time"
    watch = HangWatch(7, HangLimits(least_silence=8.0))
    for pause in (0.5, 0.25):
        clock.now += pause
        watch.received()
    assert [bool(text) for text in clock.looks(watch, 8, ticks=9)] == [False] * 7 + [True]
    clock.now += 2.0
    watch.received()
    found = clock.looks(watch, 80, ticks=9)
    # 10 seconds of this watch's longest pause, which was found hung, times 8
    assert [bool(text) for text in found].index(True) == 79


def test_seconds_in_which_this_process_was_stopped_itself_are_not_the_others(clock: Clock) -> None:
    clock.states = ["T"]
    watch = HangWatch(7, HangLimits())
    assert clock.looks(watch, 2, seconds=3600.0) == ["", ""]
    assert "for 6 s" in clock.looks(watch, 1, seconds=3600.0)[0]
    assert clock.looks(watch, 3, seconds=0.1) == [""] * 3, "a look a second"


def test_the_system_tells_stopped_sleeping_and_working_processes_apart_with_their_children(start: Start) -> None:
    sleeping = start("import time; time.sleep(600)")
    working = start("while True: pass")
    parent = start("import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'while True: pass'])")
    os.kill(sleeping.pid, signal.SIGSTOP)
    until = time.monotonic() + 20.0
    states: dict[int, list[str]] = {}
    ticks = dict.fromkeys((sleeping.pid, working.pid, parent.pid), 0)

    def seen() -> bool:
        works = min(ticks[working.pid], ticks[parent.pid]) > 9
        return states[sleeping.pid] == ["T"] and len(states[parent.pid]) == 2 and works

    while not states or (time.monotonic() < until and not seen()):
        for pid in ticks:
            states[pid], ticks[pid] = hang_watch._states_and_ticks(pid)  # pyright: ignore[reportPrivateUsage]
    assert seen(), f"{states}, {ticks}"
    assert len(states[working.pid]) == 1
    working.kill()
    working.wait()
    assert hang_watch._states_and_ticks(working.pid) == ([], 0)  # pyright: ignore[reportPrivateUsage]


def test_limits_of_a_call_are_infinite_unless_asked_for() -> None:
    assert HangLimits() == HangLimits(stopped=6.0, asleep=math.inf, least_silence=math.inf, pauses=8.0)
