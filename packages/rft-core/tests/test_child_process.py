"""A child that exchanges lines: what passes, what it leaves behind, how its end is known."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rft_core import child_process
from rft_core.child_process import ChildProcess, ParentPipes, error_fields, error_of, wait_for_any
from rft_core.errors import OptionsError, RftError, ServiceError

Start = Callable[..., ChildProcess]

BEGIN = "import os, signal, sys, time\nfrom rft_core.child_process import ParentPipes\n"
PIPES = "pipes = ParentPipes(int(sys.argv[1]), int(sys.argv[2]))\n"
ECHO = PIPES + "for line in pipes.requests: pipes.send(line.strip())\n"


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[ChildProcess] = []

    def begin(code: str, **options: Any) -> ChildProcess:
        environment = options.pop("environment", {})
        started.append(ChildProcess([sys.executable, "-c", BEGIN + code], environment, **options))
        return started[-1]

    yield begin
    for child in started:
        child.kill()


def next_line(child: ChildProcess) -> bytes:
    until = time.monotonic() + 60.0
    while not child.lines:
        assert not child.has_ended
        assert time.monotonic() < until
        wait_for_any([child], 1.0)
    return bytes(child.lines.popleft())


def wait_until_ended(child: ChildProcess) -> None:
    until = time.monotonic() + 60.0
    while not child.has_ended:
        assert time.monotonic() < until
        wait_for_any([child], 1.0)


def is_there(pid: int) -> bool:
    """Whether a process runs; one that is merely not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_lines_larger_than_a_pipe_pass_in_both_directions_and_stay_in_order(start: Start) -> None:
    child = start(ECHO)
    lines = [b"x" * 1_000_000, b"", b"short", b"y" * 200_000]
    for line in lines:
        child.send(line)
    assert child.is_sending
    assert [next_line(child) for _ in lines] == lines
    assert not child.is_sending
    assert child.is_alive


def test_several_children_are_waited_for_at_once(start: Start) -> None:
    children = [start(ECHO) for _ in range(3)]
    for number, child in enumerate(children):
        child.send(b"%d" % number)
    until = time.monotonic() + 60.0
    while not all(child.lines for child in children) and time.monotonic() < until:
        wait_for_any(children, 1.0)
    assert [bytes(child.lines[0]) for child in children] == [b"0", b"1", b"2"]
    assert not wait_for_any(children, 0.01)


def test_what_it_prints_is_kept_apart_from_the_pipes_and_the_end_of_it_shown(start: Start, tmp_path: Path) -> None:
    code = "print('a' * 100_000); print('last', flush=True); print(repr(input()))"
    child = start(code)
    wait_until_ended(child)
    assert child.kill(60.0) == "ended with exit code 1"
    assert "last" in child.last_output
    assert "EOFError" in child.last_output
    assert len(child.last_output) < 10_000
    logged = start(code, log=tmp_path / "log")
    wait_until_ended(logged)
    logged.kill(60.0)
    assert logged.last_output == ""
    assert "EOFError" in (tmp_path / "log").read_text()


def test_variables_stand_beside_those_of_this_process(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_OWN", "own")
    child = start(
        PIPES + "pipes.send((os.environ['RFT_OWN'] + os.environ['RFT_MORE']).encode())",
        environment={"RFT_MORE": "more"},
    )
    assert next_line(child) == b"ownmore"


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("sys.exit(7)", "ended with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("os.close(int(sys.argv[2])); time.sleep(600)", "was killed by SIGKILL"),
    ],
)
def test_the_end_of_a_child_is_noticed_and_said(start: Start, code: str, how: str) -> None:
    child = start(code)
    wait_until_ended(child)
    assert child.kill(5.0 if "sleep" not in code else 0.1) == how
    assert not child.is_alive
    assert child.kill() == how


def test_lines_that_came_before_the_end_are_there(start: Start) -> None:
    child = start(PIPES + "pipes.send(b'one'); pipes.send(b'two'); os._exit(0)")
    wait_until_ended(child)
    assert [bytes(line) for line in child.lines] == [b"one", b"two"]


def test_a_kill_reaches_what_the_child_has_started(start: Start) -> None:
    child = start(
        PIPES + "grandchild = os.fork()\nif grandchild: pipes.send(str(grandchild).encode())\ntime.sleep(600)"
    )
    grandchild = int(next_line(child))
    assert is_there(grandchild)
    assert child.kill() == "was killed by SIGKILL"
    until = time.monotonic() + 10.0
    while is_there(grandchild) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_there(grandchild)


DAEMON = (
    "def daemon(pipes):\n"
    "    if os.fork(): return\n"
    "    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n"
    "    pipes.send(b'%d' % os.getpid())\n"
    "    for number in (1, 2, int(sys.argv[1]), int(sys.argv[2])): os.close(number)\n"
    "    time.sleep(600)\n"
)


def test_a_kill_reaches_a_daemon_that_has_left_the_session_of_the_child(start: Start) -> None:
    code = DAEMON + PIPES + "daemon(pipes)\nfor line in pipes.requests: pass\n"
    child, other = start(code), start(code)
    daemon, others = int(next_line(child)), int(next_line(other))
    assert is_there(daemon)
    child.kill()
    assert not is_there(daemon)
    assert is_there(others), "what another child has started is left alone"
    other.kill()
    assert not is_there(others)


def test_a_child_whose_parent_is_gone_ends_its_daemons_itself(start: Start) -> None:
    code = DAEMON + PIPES + "daemon(pipes)\nfor line in pipes.requests: kill_descendants(); pipes.send(b'done')\n"
    child = start("from rft_core.child_process import kill_descendants\n" + code)
    daemon = int(next_line(child))
    child.send(b"end")
    assert next_line(child) == b"done"
    assert not is_there(daemon)
    assert child.is_alive


def test_variables_that_are_not_inherited_are_not_there(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    code = PIPES + "pipes.send(repr([os.environ.get(name) for name in ('A_TOKEN', 'B', 'C')]).encode())\n"
    rest = {name: value for name, value in os.environ.items() if name != "A_TOKEN"} | {"B": "b"}
    child = start(code, inherited=rest, environment={"C": "c"})
    assert next_line(child) == b"[None, 'b', 'c']"


def test_a_child_that_reads_nothing_does_not_block_and_one_that_closes_its_pipe_has_ended(start: Start) -> None:
    silent = start("time.sleep(600)")
    silent.send(b"x" * 1_000_000)
    began = time.monotonic()
    for _ in range(20):
        wait_for_any([silent], 0.01)
    assert silent.is_sending
    assert time.monotonic() - began < 30.0
    closed = start("os.close(int(sys.argv[1])); time.sleep(600)")
    closed.send(b"x" * 1_000_000)
    wait_until_ended(closed)
    assert closed.is_alive


def test_a_line_without_an_end_is_the_end_of_its_child(start: Start) -> None:
    child = start(PIPES + "pipes.send(b'x' * 1000); pipes.send(b'y' * 1_000_000)", longest_line=10_000)
    wait_until_ended(child)
    assert [len(line) for line in child.lines] == [1000]


def test_a_dead_child_keeps_its_number_until_it_is_killed_from_here(start: Start) -> None:
    child = start("pass")
    wait_until_ended(child)
    until = time.monotonic() + 60.0
    while child.is_alive and time.monotonic() < until:
        time.sleep(0.01)
    assert Path(f"/proc/{child.pid}").exists(), "not reaped: nobody else can have its number"
    os.killpg(child.pid, signal.SIGKILL)
    assert child.kill() == "ended with exit code 0"
    assert not Path(f"/proc/{child.pid}").exists()


def test_the_childs_side_reads_lines_and_writes_them_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    read, requests = os.pipe()
    replies, write = os.pipe()
    os.set_inheritable(write, True)
    pipes = ParentPipes(read, write)
    try:
        assert not os.get_inheritable(read)
        assert not os.get_inheritable(write)
        os.write(requests, b"one\ntwo\n")
        os.close(requests)
        assert list(pipes.requests) == [b"one\n", b"two\n"]
        real = os.write
        monkeypatch.setattr(child_process.os, "write", lambda descriptor, data: real(descriptor, data[:10]))
        pipes.send(b"b" * 45)
        assert os.read(replies, 100) == b"b" * 45 + b"\n"
    finally:
        pipes.requests.close()
        os.close(replies)
        os.close(write)


@pytest.mark.parametrize("kind", RftError.__subclasses__())
def test_a_typed_error_crosses_with_all_its_fields(kind: type[RftError]) -> None:
    error = kind(code="a.b", what="found", where="there", why="rule", state="unchanged", do="this", bundle="file")
    again = error_of(error_fields(error))
    assert again.problem == error.problem
    assert type(again) is (kind if kind.__module__ == OptionsError.__module__ else ServiceError)


def test_further_descriptors_are_inherited_and_the_exit_code_is_known_after_the_end(start: Start) -> None:
    read, write = os.pipe()
    os.write(write, b"more")
    os.close(write)
    child = start(PIPES + f"pipes.send(os.read({read}, 9)); sys.exit(3)", pass_fds=(read,))
    os.close(read)
    assert next_line(child) == b"more"
    assert child.exit_code is None
    child.kill(grace=30.0)
    assert child.exit_code == 3


def test_a_child_runs_as_another_user_and_in_no_other_group_where_one_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    popen = child_process.subprocess.Popen

    def recorded(*arguments: Any, **options: Any) -> Any:
        given.append({name: options.pop(name) for name in ("user", "group", "extra_groups")})
        return popen(*arguments, **options)

    monkeypatch.setattr(child_process.subprocess, "Popen", recorded)
    start("", user=65534)
    start("")
    assert given == [
        {"user": 65534, "group": 65534, "extra_groups": ()},
        {"user": None, "group": None, "extra_groups": None},
    ]
