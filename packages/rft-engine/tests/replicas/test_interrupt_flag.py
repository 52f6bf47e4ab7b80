"""The flag by which one process ends a call of another: its number, its file, and what it leaves open."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rft_engine.replicas import interrupt_flag
from rft_engine.replicas.interrupt_flag import InterruptFlag


def test_a_call_and_those_before_it_are_reached_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room: list[int] = []
    monkeypatch.setattr(interrupt_flag, "shared_directory", lambda size: (room.append(size), tmp_path)[1])
    descriptors: list[int] = []
    make = tempfile.mkstemp

    def mkstemp(**options: Any) -> tuple[int, str]:
        descriptor, name = make(**options)
        descriptors.append(os.dup2(descriptor, 200))
        os.close(descriptor)
        return descriptors[0], name

    monkeypatch.setattr(interrupt_flag.tempfile, "mkstemp", mkstemp)
    mine = InterruptFlag.create()
    assert (mine.path.parent, room, mine.path.stat().st_size) == (tmp_path, [8], 8)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])
    other = InterruptFlag(str(mine.path))
    assert [other.reached(call) for call in (0, 1)] == [True, False]
    mine.unlink()
    mine.unlink()
    assert list(tmp_path.iterdir()) == []
    for number in (3, 2**40, 1):
        mine.set(number)
        assert [other.reached(call) for call in (number - 1, number, number + 1)] == [True, True, False]
