"""What the system says of a process on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rft_dist.health import process_state as states
from rft_dist.health.process_state import ALIVE, GONE, STOPPED, UNKNOWN, process_state, this_machine


def test_the_state_of_a_process_is_what_the_system_says() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert process_state(child.pid) == ALIVE
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet
        assert process_state(child.pid) == GONE
    finally:
        child.wait()
    assert process_state(child.pid) == GONE


@pytest.mark.parametrize(
    ("letters", "state"), [("Tt", STOPPED), ("RDSI", ALIVE), ("ZXx", GONE)], ids=["stopped", "alive", "gone"]
)
def test_the_state_follows_the_name_of_the_program(tmp_path: Path, letters: str, state: str) -> None:
    (tmp_path / "7").mkdir()
    for letter in letters:
        (tmp_path / "7" / "stat").write_text(f"7 (a ) Z (b) {letter} 1 7 7 0")
        assert process_state(7, tmp_path) == state
        (tmp_path / "7" / "stat").write_bytes(b"7 (\xff) T) " + f"{letter} 1 7 7 0".encode())
        assert process_state(7, tmp_path) == state, "a name need not be UTF-8"
    assert process_state(8, tmp_path) == GONE


def test_a_state_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "7" / "stat").mkdir(parents=True)
    assert process_state(7, tmp_path) == UNKNOWN


@pytest.mark.parametrize(
    ("answer", "state"), [(None, ALIVE), (PermissionError(), ALIVE), (ProcessLookupError(), GONE)], ids=str
)
def test_without_proc_a_process_is_asked_by_a_signal_that_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: OSError | None, state: str
) -> None:
    sent: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if answer is not None:
            raise answer

    monkeypatch.setattr(states.os, "kill", kill)
    assert process_state(7, tmp_path / "none") == state
    assert sent == [(7, 0)]


def machine(root: Path, boot: str, pid: str, net: str) -> str:
    """The machine of a process that is told these."""
    (root / "sys/kernel/random").mkdir(parents=True)
    (root / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
    (root / "self/ns").mkdir(parents=True)
    (root / "self/ns/pid").symlink_to(pid)
    (root / "self/ns/net").symlink_to(net)
    return this_machine(root)


def test_a_machine_is_its_boot_and_its_namespaces_of_processes_and_of_the_network(tmp_path: Path) -> None:
    places = (("a", "pid:[1]", "net:[2]"), ("b", "pid:[1]", "net:[2]"), ("a", "pid:[3]", "net:[2]"))
    places += (("a", "pid:[1]", "net:[3]"),)
    found = [machine(tmp_path / str(number), *place) for number, place in enumerate(places)]
    assert found == [" ".join(place) for place in places]
    assert this_machine() == this_machine()


def test_a_machine_that_tells_nothing_is_no_other_s(tmp_path: Path) -> None:
    assert this_machine(tmp_path) == f"{os.uname().nodename} {os.getpid()}" != this_machine()
