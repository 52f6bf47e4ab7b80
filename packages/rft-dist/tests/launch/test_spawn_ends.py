"""When ranks that one command started are ended, and whose exit code counts: by processes that are doubles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_core.errors import ExitCode
from rft_dist.launch import spawn
from rft_dist.launch.spawn import last_lines, rank_variables, spawn_ranks

TERM, KILL, USR1 = signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1
SAVED, PEER, OUTAGE = int(ExitCode.SAVED_AFTER_SIGNAL), int(ExitCode.PEER), int(ExitCode.OUTAGE)


class Process:
    """Ends at a second with a code, or a moment after a signal that it does not survive."""

    def __init__(self, world: World, command: list[str], options: dict[str, Any]) -> None:
        self.world, self.rank, self.returncode = world, len(world.processes), None
        self.command, self.options = command, options
        self.kept = set(os.environ)
        self.end, self.code = world.plan[self.rank]
        self.waited = False

    def poll(self) -> int | None:
        if self.returncode is None and self.world.now >= self.end:
            self.returncode = self.code
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert self.returncode is None
        self.world.sent.append((self.world.now, self.rank, number))
        if number not in self.world.ignored and self.end > self.world.now + 1.0:
            self.end, self.code = self.world.now + 1.0, -number

    def kill(self) -> None:
        self.send_signal(KILL)
        self.returncode = -KILL

    def wait(self) -> None:
        self.waited = True


class World:
    """A clock that waiting moves, and processes by plan."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: dict[int, tuple[float, int]]) -> None:
        self.now, self.plan = 0.0, plan
        self.processes: list[Process] = []
        self.sent: list[tuple[float, int, int]] = []
        self.ignored: tuple[int, ...] = (USR1,)
        self.events: dict[float, Callable[[], Any]] = {}
        popen = SimpleNamespace(Popen=self.start, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
        monkeypatch.setattr(spawn, "subprocess", popen)
        monkeypatch.setattr(spawn, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(spawn, "_POLL_SECONDS", 0.5)

    def start(self, command: list[str], **options: Any) -> Process:
        self.processes.append(Process(self, command, options))
        return self.processes[-1]

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.events.pop(self.now, lambda: None)()


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *plan: tuple[float, int], **changes: Any) -> tuple[World, Any]:
    world = World(monkeypatch, dict(enumerate(plan)))
    for name, value in changes.items():
        setattr(world, name, value)
    ended = spawn_ranks(("python", "x.py"), len(plan), log_folder=folder / "logs" / "new", environment={"A": "b"})
    assert all(process.waited for process in world.processes)
    return world, ended


def test_each_rank_is_started_with_its_variables_and_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    world, ended = run(monkeypatch, tmp_path, (1.0, 0), (2.0, 0), (1.0, 0))
    logs = tuple(tmp_path / "logs" / "new" / f"output_rank_{rank}.log" for rank in (1, 2))
    assert ended == spawn.Ended(0, None, (0, 0, 0), logs)
    assert world.now == 2.0
    ports = {process.options["env"]["MASTER_PORT"] for process in world.processes}
    assert len(ports) == 1
    for process in world.processes:
        rank, options = process.rank, process.options
        variables = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        variables |= {"RFT_NPROC": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports.copy().pop()}
        assert options.pop("env") == {"A": "b", **variables}
        assert rank_variables(rank, 3, int(variables["MASTER_PORT"])) == variables
        output = options.pop("stdout")
        assert (output is None) == (rank == 0)
        if output is not None:
            assert (output.name, output.mode, output.closed) == (str(logs[rank - 1]), "ab", True)
        assert options == {
            "stderr": None if output is None else subprocess.STDOUT,
            "stdin": subprocess.DEVNULL,
            "start_new_session": True,
            "preexec_fn": spawn._end_with_parent,
        }
        assert process.command == ["python", "x.py"]


def test_the_others_have_five_seconds_then_are_asked_and_ten_later_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world, ended = run(monkeypatch, tmp_path, (99.0, 0), (1.0, 4), (3.0, 0), (99.0, 0), ignored=(TERM,))
    assert world.sent[:2] == [(6.5, 0, TERM), (6.5, 3, TERM)], "once, and to those that still run"
    assert [(at, rank, number) for at, rank, number in world.sent[2:4]] == [(16.5, 0, KILL), (16.5, 3, KILL)]
    assert {number for _, _, number in world.sent[2:]} == {KILL}
    assert (ended.code, ended.rank, ended.codes) == (4, 1, (-KILL, 4, 0, -KILL))


@pytest.mark.parametrize(
    ("plan", "code", "rank"),
    [
        (((1.0, PEER), (2.0, 7)), 7, 1),
        (((2.0, 7), (1.0, 4)), 4, 1),
        (((1.0, PEER), (2.0, PEER)), PEER, 0),
        (((2.0, PEER), (1.0, PEER)), PEER, 1),
        (((1.0, SAVED), (2.0, PEER)), PEER, 1),
        (((1.0, 0), (2.0, SAVED)), SAVED, 1),
        (((1.0, OUTAGE), (2.0, PEER)), PEER, 1),
        (((1.0, -9), (1.0, 0)), 137, 0),
        (((1.0, PEER), (99.0, 0)), PEER, 0),
    ],
)
def test_the_code_is_that_of_the_first_that_failed_of_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: tuple[tuple[float, int], ...], code: int, rank: int
) -> None:
    _, ended = run(monkeypatch, tmp_path, *plan)
    assert (ended.code, ended.rank) == (code, rank)


@pytest.mark.parametrize("saved", [SAVED, OUTAGE])
def test_ranks_that_save_after_a_signal_or_in_an_outage_have_all_the_time_they_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: int
) -> None:
    world, ended = run(monkeypatch, tmp_path, (1.0, saved), (60.0, saved))
    assert world.sent == []
    assert (ended.code, ended.rank, world.now) == (saved, 0, 60.0)


def test_a_signal_reaches_those_that_still_run_while_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = [signal.getsignal(number) for number in (TERM, signal.SIGINT, USR1)]
    numbers = {2.0: TERM, 3.0: signal.SIGINT, 4.0: USR1}
    events = {at: lambda number=number: signal.raise_signal(number) for at, number in numbers.items()}
    world, _ = run(
        monkeypatch, tmp_path, (9.0, 0), (1.0, 0), events=events, ignored=tuple(int(each) for each in numbers.values())
    )
    assert world.sent == [(at, 0, number) for at, number in numbers.items()]
    assert [signal.getsignal(number) for number in (TERM, signal.SIGINT, USR1)] == before


def test_what_still_runs_when_the_wait_breaks_off_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch, {0: (9.0, 0), 1: (0.5, 0)})

    def interrupt() -> None:
        raise KeyboardInterrupt

    world.events = {1.0: interrupt}
    with pytest.raises(KeyboardInterrupt):
        spawn_ranks(("x",), 2, log_folder=tmp_path)
    assert world.sent == [(1.0, 0, KILL)]
    assert all(process.waited for process in world.processes)
    assert world.processes[0].options["env"].keys() >= world.processes[0].kept, "this process's own environment"


def test_a_child_is_asked_to_end_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    library = SimpleNamespace(prctl=lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(spawn, "ctypes", SimpleNamespace(CDLL=lambda name: asked.append(name) or library))
    spawn._end_with_parent()
    assert asked == [None, (1, TERM)]


def test_the_last_twenty_lines_of_an_output_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "a"
    assert last_lines(log) == ""
    log.write_bytes(b"".join(b"%d \xff\n" % number for number in range(30)))
    assert last_lines(log).split("\n") == [f"{number} \ufffd" for number in range(10, 30)]
