"""`--nproc`: ranks that find one another, one end for all, and the exit code of the one that failed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rft_dist.launch import spawn
from rft_dist.launch.environment import ranks_from_environment
from rft_dist.launch.spawn import last_lines, rank_variables, spawn_ranks
from rft_dist.preflight.process_checks import check_start


def program(text: str) -> list[str]:
    """A command whose ranks know their number as `rank`."""
    head = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    return [sys.executable, "-c", head + textwrap.dedent(text)]


def test_every_rank_has_its_number_and_one_place_to_meet(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    text = f"""
    open(sys.argv[1] + f"/{{rank}}", "w").write(" ".join(os.environ[name] for name in "{names}".split()))
    print("rank", rank, "was here")
    """
    ended = spawn_ranks([*program(text), str(tmp_path)], 3, log_folder=tmp_path / "logs")
    assert (ended.code, ended.rank, ended.codes) == (0, None, (0, 0, 0))
    rows = [(tmp_path / f"{rank}").read_text().split() for rank in range(3)]
    assert [row[:4] for row in rows] == [[f"{rank}", f"{rank}", "3", "3"] for rank in range(3)]
    assert len({tuple(row[4:]) for row in rows}) == 1
    assert [log.read_text() for log in ended.logs] == ["rank 1 was here\n", "rank 2 was here\n"]


def test_ranks_that_meet_more_than_once_have_a_port_for_each_meeting(tmp_path: Path) -> None:
    text = """
    from rft_dist.launch.environment import take_next_port
    ports = []
    for _ in range(4):
        ports.append(os.environ["MASTER_PORT"])
        take_next_port(os.environ)
    open(sys.argv[1] + f"/{rank}", "w").write(" ".join(ports))
    """
    ended = spawn_ranks([*program(text), str(tmp_path)], 2, log_folder=tmp_path / "logs", meetings=3)
    assert ended.code == 0
    first, second = ((tmp_path / f"{rank}").read_text().split() for rank in range(2))
    assert first == second
    assert len(set(first)) == 3
    assert first[3] == first[2], "no further port is held"


def test_the_variables_are_those_of_a_rank_of_this_machine() -> None:
    values = rank_variables(1, 4, 29512)
    info = ranks_from_environment(values)
    assert (info.rank, info.world_size, info.local_rank, info.node_rank) == (1, 4, 1, 0)
    assert info.origins["rank"] == "RANK (--nproc)"
    grid = check_start(info, values, interfaces={"lo"})
    assert (grid.num_nodes, grid.ranks_per_node) == (1, 4)


def test_a_rank_can_listen_at_the_held_port_and_nobody_else_is_given_it_twenty_times() -> None:
    for _ in range(20):
        with spawn._held_port() as port:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("", port))
            served = TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=10))
            served.set("key", "value")
            assert served.get("key") == b"value"
            del served


@pytest.mark.parametrize("failing", [0, 1])
def test_the_exit_code_is_that_of_the_rank_that_failed_and_not_of_those_that_missed_it(
    failing: int, tmp_path: Path
) -> None:
    text = f"""
    if rank == {failing}:
        print("error  the cause")
        sys.exit(4)
    time.sleep(0.3)
    sys.exit(9)
    """
    ended = spawn_ranks(program(text), 2, log_folder=tmp_path)
    assert (ended.code, ended.rank) == (4, failing)
    assert sorted(ended.codes) == [4, 9]
    if failing:
        assert last_lines(ended.logs[0]) == "error  the cause"


def test_a_cause_that_is_slower_to_end_than_those_that_missed_it_is_still_the_cause(tmp_path: Path) -> None:
    ended = spawn_ranks(program("time.sleep(0.4 * rank); sys.exit(9 if rank == 0 else 7)"), 2, log_folder=tmp_path)
    assert (ended.code, ended.rank) == (7, 1)


def test_ranks_that_hang_after_a_failure_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "GRACE_SECONDS", 0.2)
    text = """
    if rank == 1:
        sys.exit(4)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)
    """
    ended = spawn_ranks(program(text), 3, log_folder=tmp_path)
    assert (ended.code, ended.rank) == (4, 1)
    assert ended.codes == (-signal.SIGKILL, 4, -signal.SIGKILL)


def test_a_rank_that_is_killed_is_told_as_a_shell_tells_it(tmp_path: Path) -> None:
    ended = spawn_ranks(
        program("os.kill(os.getpid(), signal.SIGKILL) if rank else sys.exit(9)"), 2, log_folder=tmp_path
    )
    assert (ended.code, ended.rank) == (128 + signal.SIGKILL, 1)


PARENT = f"""
import sys
sys.path.insert(0, {str(Path(spawn.__file__).parents[1])!r})
from pathlib import Path
from rft_dist.launch.spawn import spawn_ranks
ended = spawn_ranks([sys.executable, *sys.argv[1:]], 2, log_folder=Path(sys.argv[2]))
sys.exit(ended.code)
"""
"""Starts two ranks of a program with its folder as its word."""

CHILD = """
import os, signal, socket, sys, time
mine = sys.argv[1] + "/" + os.environ["RANK"]
def save(number, frame):
    time.sleep(float(os.environ["RANK"]))
    open(mine + ".saved", "w").close()
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
if os.environ["RANK"] == "0":
    # as the store of a run does, for as long as rank 0 lives
    store = socket.socket()
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    store.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    store.listen()
open(mine + ".new", "w").write(str(os.getpid()) + " " + os.environ["MASTER_PORT"])
os.rename(mine + ".new", mine + ".ready")
time.sleep(100)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process with two ranks that are ready."""
    (tmp_path / "child.py").write_text(CHILD)
    words = [sys.executable, "-c", PARENT, str(tmp_path / "child.py"), str(tmp_path)]
    process = subprocess.Popen(words)
    try:
        wait_for(lambda: all((tmp_path / f"{rank}.ready").exists() for rank in range(2)))
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; fails after half a minute."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_signal_reaches_every_rank_and_the_save_of_each_is_awaited(parent: subprocess.Popen, tmp_path: Path) -> None:
    parent.send_signal(signal.SIGUSR1)
    assert parent.wait(timeout=60) == 75
    assert all((tmp_path / f"{rank}.saved").exists() for rank in range(2))


def test_ranks_end_when_what_started_them_is_killed(parent: subprocess.Popen, tmp_path: Path) -> None:
    pids, ports = zip(*(map(int, (tmp_path / f"{rank}.ready").read_text().split()) for rank in range(2)), strict=True)
    assert all(map(is_running, pids))
    assert not can_listen(ports[0]), "rank 0 listens"
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(map(is_running, pids)))
    wait_for(lambda: can_listen(ports[0]))


def can_listen(port: int) -> bool:
    """Whether nobody listens at a port; connections that were cut are in nobody's way."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()
        except OSError:
            return False
    return True


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except OSError:
        return False


def test_nothing_of_this_process_is_changed(tmp_path: Path) -> None:
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    spawn_ranks(program("pass"), 2, log_folder=tmp_path)
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before
