"""One run in the cage, with a double of the child process: its command line, its limits, and whose fault an end is."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from rft_trainer.sandbox import cage
from rft_trainer.sandbox.cage import Cage, CageEnd, CageLimits, cage_command, run_cages
from rft_trainer.sandbox.interpreter import CagedPython

PYTHON = CagedPython(Path("/copy"), "/lib64/ld-linux.so.2")
LIMITS = CageLimits(cpu_seconds=2, memory_bytes=1 << 28, wall_seconds=8.0)
TESTS = [{"call": "f", "args": [], "kwargs": []}] * 2


class Child:
    """A child process that says and does what a test wants."""

    last: Child

    def __init__(self, command: list[str], environment: dict[str, str], **options: Any) -> None:
        self.command, self.environment, self.options = command, environment, options
        self.lines: deque[bytearray] = deque()
        self.has_ended, self.exit_code, self.last_output, self.pid, self.killed = False, None, "", 1, False
        Child.last = self

    def send(self, line: bytes) -> None:
        self.request = json.loads(line)

    def say(self, **reply: Any) -> None:
        self.lines.append(bytearray(json.dumps({"nonce": self.request["nonce"], **reply}).encode()))

    def end(self, code: int) -> None:
        self.has_ended, self.exit_code = True, code

    def kill(self, grace: float = 0.0) -> str:
        self.killed = True
        return ""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Cage, Child]:
    monkeypatch.setattr(cage, "ChildProcess", Child)
    monkeypatch.setattr(cage, "_out_of_memory_kills", lambda: 0)
    run = Cage(PYTHON, LIMITS, "program", TESTS)
    return run, Child.last


def over(run: Cage) -> tuple[CageEnd, str]:
    assert run.has_ended()
    return run.run.end, run.run.reason


def test_the_command_shares_no_namespace_and_holds_no_more_than_a_python() -> None:
    words = cage_command(PYTHON, LIMITS, 9)
    for kind in ("user", "ipc", "pid", "net", "uts", "cgroup"):
        assert f"--unshare-{kind}" in words
    assert {"--disable-userns", "--die-with-parent", "--new-session", "--clearenv"} <= set(words)
    binds = [tuple(words[at + 1 : at + 3]) for at, word in enumerate(words) if word.endswith("bind")]
    devices = ("/dev/null", "/dev/zero", "/dev/urandom")
    assert binds == [
        ("/copy", "/python"),
        ("/copy/lib/loader", "/lib64/ld-linux.so.2"),
        *((device, device) for device in devices),
    ]
    assert words[words.index("--cap-drop") + 1] == "ALL"
    assert words[words.index("--size") : words.index("--size") + 4] == ["--size", str(16 << 20), "--tmpfs", "/tmp"]
    # after all mounts, so that the root itself cannot be written
    assert words.index("--remount-ro") > words.index("--tmpfs")
    assert words[words.index("--seccomp") + 1] == "9"
    assert not {"--proc", "--dev", "--bind", "--share-net"} & set(words)


def test_inputs_and_limits_are_sent_and_no_variable_is_inherited(
    made: tuple[Cage, Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, child = made
    assert child.request | {"nonce": ""} == {
        "nonce": "",
        "program": "program",
        "tests": TESTS,
        "cpu_seconds": 2,
        "memory_bytes": 1 << 28,
        "file_bytes": 16 << 20,
        "num_files": 64,
        "num_processes": 32,
    }
    assert (child.environment, child.options["inherited"]) == ({}, {})
    for user, given in ((0, 65534), (1000, None)):
        monkeypatch.setattr(cage.os, "getuid", lambda user=user: user)
        Cage(PYTHON, LIMITS, "program", TESTS)
        assert Child.last.options["user"] == given


def test_replies_to_every_test_end_it_well_and_the_first_of_each_counts(made: tuple[Cage, Child]) -> None:
    run, child = made
    assert not run.has_ended()
    child.say(ready=True)
    child.say(test=0, value=["int", "0x1"])
    child.say(test=0, value=["int", "0x2"])
    child.say(test=1, error="x")
    child.say(test=2, value=["none"])
    child.lines.append(bytearray(b'{"nonce": "guessed", "test": 1, "value": 3}'))
    child.lines.append(bytearray(b"[" * 100_000))
    child.end(0)
    assert over(run) == (CageEnd.DONE, "")
    assert run.run.replies[0]["value"] == ["int", "0x1"]
    assert sorted(run.run.replies) == [0, 1]
    assert child.killed


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended itself"),
        (1, "ended itself"),
        (137, "processor time"),
        (152, "processor time"),
        (139, "signal 11"),
    ],
)
def test_an_end_before_the_last_test_is_the_programs(made: tuple[Cage, Child], code: int, words: str) -> None:
    run, child = made
    child.say(ready=True)
    child.say(test=0, value=["none"])
    child.end(code)
    end, reason = over(run)
    assert end is CageEnd.PROGRAM
    assert words in reason


def test_a_system_without_memory_is_not_the_programs_fault(
    made: tuple[Cage, Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, child = made
    monkeypatch.setattr(cage, "_out_of_memory_kills", lambda: 1)
    child.say(ready=True)
    child.end(137)
    assert over(run) == (CageEnd.BROKEN, "the system ran out of memory")


def test_a_cage_that_does_not_come_up_is_broken_and_says_why(made: tuple[Cage, Child]) -> None:
    run, child = made
    child.last_output = "bwrap: No permissions to create new namespace\n"
    child.say(test=0, value=["none"])  # nothing counts before the cage is up
    child.end(1)
    assert over(run) == (CageEnd.BROKEN, "bwrap: No permissions to create new namespace")
    assert run.run.replies == {}


def test_a_flood_of_replies_is_the_programs_and_is_not_read_to_its_end(made: tuple[Cage, Child]) -> None:
    run, child = made
    child.say(ready=True)
    child.lines.extend(bytearray(b"{}") for _ in range(100_000))
    assert over(run) == (CageEnd.PROGRAM, "more results than tests have")
    assert len(child.lines) > 90_000


@pytest.mark.parametrize(
    ("waited", "ready", "elapsed", "end"),
    [
        (0.1, True, 9.0, CageEnd.PROGRAM),  # it had its time, asleep or not
        (4.0, True, 9.0, None),  # the machine was busy: it gets what it waited for
        (30.0, True, 33.0, CageEnd.LATE),
        (0.0, False, 33.0, CageEnd.LATE),
        (None, True, 9.0, CageEnd.LATE),
    ],
)
def test_a_late_run_is_the_programs_fault_only_where_it_had_its_time(
    made: tuple[Cage, Child],
    monkeypatch: pytest.MonkeyPatch,
    waited: float | None,
    ready: bool,
    elapsed: float,
    end: CageEnd | None,
) -> None:
    run, child = made
    if ready:
        child.say(ready=True)
    monkeypatch.setattr(cage, "_seconds_waited", lambda pid: waited)
    now = time.monotonic() + elapsed
    monkeypatch.setattr(cage.time, "monotonic", lambda: now)
    if end is None:
        assert not run.has_ended()
        assert run.deadline == pytest.approx(now + 3.0, abs=0.1)
    else:
        assert over(run)[0] is end


def test_runs_are_in_order_a_few_at_once_and_killed_when_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Child] = []

    class Quick(Child):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            children.append(self)

    most = 0

    def wait(active: list[Quick], seconds: float) -> None:
        nonlocal most
        most = max(most, len(active))
        child = active[-1]  # the last to start ends first
        child.say(ready=True)
        child.say(test=0, value=["str", child.request["program"]])
        child.end(0)

    monkeypatch.setattr(cage, "ChildProcess", Quick)
    monkeypatch.setattr(cage, "wait_for_any", wait)
    runs = run_cages(PYTHON, [(LIMITS, program, TESTS[:1]) for program in "abcde"], at_once=2)
    assert [run.replies[0]["value"][1] for run in runs] == list("abcde")
    assert most == 2

    def interrupted(active: list[Quick], seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cage, "wait_for_any", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_cages(PYTHON, [(LIMITS, program, TESTS) for program in "abc"], at_once=2)
    assert [child.killed for child in children[-2:]] == [True, True]
