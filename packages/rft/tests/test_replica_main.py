"""A replica on the trainer's cores lets it go first, whatever the kernel knows of sessions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rft import replica_main


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of niceness that this process was asked to take."""
    found: list[int] = []
    monkeypatch.setattr(os, "nice", found.append)
    return found


def test_the_session_gives_way_as_the_process_does(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "autogroup"
    monkeypatch.setattr(replica_main, "_AUTOGROUP", group)
    replica_main.give_way()
    assert group.read_text() == str(asked[0])
    assert asked[0] > 0


def test_a_kernel_without_groups_of_sessions_is_no_error(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_main, "_AUTOGROUP", tmp_path / "none" / "autogroup")
    replica_main.give_way()
    assert len(asked) == 1


def test_sessions_that_are_told_at_once_take_turns(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, told = tmp_path / "autogroup", list[str]()

    def write(path: Path, text: str) -> None:
        told.append(text)
        if len(told) < 3:
            raise BlockingIOError
        assert path == group

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(replica_main, "_AUTOGROUP", group)
    monkeypatch.setattr(replica_main, "_TRY_SECONDS", 0.0)
    replica_main.give_way()
    assert told == [str(asked[0])] * 3


def test_the_kernel_takes_it(asked: list[int]) -> None:
    """In a child with a session of its own, so that the niceness of the tests stays what it is."""
    group = Path("/proc/self/autogroup")
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        try:
            os.setsid()
            group.write_text("1")
            if b"nice 1" in group.read_bytes():
                replica_main.give_way()
                os.write(write_fd, group.read_bytes())
        finally:
            os._exit(0)
    os.close(write_fd)
    os.waitpid(child, 0)
    told = os.read(read_fd, 100).decode().rstrip()
    os.close(read_fd)
    if not told:
        pytest.skip("this kernel does not group sessions, or does not let them be told")
    assert told.endswith("nice 10")
    assert asked == []
