"""Stacks on request: of all threads, as often as they are asked for, and never from a process that would end of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.process.stack_dumps import SIGNAL, StackDumps, last_process, main_thread_lines, request_stacks


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def stacks(run: Path) -> Iterator[StackDumps]:
    """The stacks of this process, as rank 3."""
    stacks = StackDumps(3)
    stacks.attach(run)
    yield stacks
    stacks.close()


def test_every_request_gives_the_stacks_of_all_threads(run: Path, stacks: StackDumps) -> None:
    end = threading.Event()

    def waits_for_the_end() -> None:
        end.wait()

    thread = threading.Thread(target=waits_for_the_end)
    thread.start()
    try:
        for _ in range(3):
            (found,) = request_stacks(run)
            assert (found.rank, found.missing) == (3, "")
            assert "waits_for_the_end" in found.text
            assert any("test_every_request_gives" in line for line in found.main)
            assert found.num_threads >= 2
    finally:
        end.set()
        thread.join()
    assert found.file.read_text().count(" asked for\n") == 3
    assert main_thread_lines(found, 1) == [found.main[0], f"... {len(found.main) - 1} more"]


def test_a_call_that_is_interrupted_goes_on(run: Path, stacks: StackDumps) -> None:
    reader, writer = os.pipe()
    threading.Timer(0.0, lambda: (os.kill(os.getpid(), SIGNAL), os.write(writer, b"x"))).start()
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    os.close(writer)


def test_the_folder_may_come_later_and_the_end_takes_the_answer_back(run: Path) -> None:
    logs = run / "logs"
    logs.rmdir()
    stacks = StackDumps(0)
    stacks.attach(run)
    stacks.open()
    assert list(request_stacks(run)) == []
    logs.mkdir()
    stacks.open()
    stacks.open()
    file = logs / "stacks_rank_0.txt"
    process = last_process(file)
    assert process is not None
    assert (process.pid, process.is_alive) == (os.getpid(), True)
    assert file.read_text().count("process {") == 1
    stacks.close()
    stacks.close()
    stacks.open()
    (found,) = request_stacks(run)
    assert (found.text, found.missing) == ("", "its process has ended")
    # one that was sent a moment before ends nothing
    os.kill(os.getpid(), SIGNAL)
    until = time.monotonic() + 30  # another thread writes
    while "Current thread" not in file.read_text() and time.monotonic() < until:
        time.sleep(0.01)
    assert "Current thread" in file.read_text()


def test_a_handler_of_the_program_stays(run: Path) -> None:
    received: list[int] = []
    before = signal.signal(SIGNAL, lambda number, _: received.append(number))
    try:
        stacks = StackDumps(0)
        stacks.attach(run)
        assert list((run / "logs").iterdir()) == []
        os.kill(os.getpid(), SIGNAL)
        assert received == [SIGNAL]
        stacks.close()
    finally:
        signal.signal(SIGNAL, before)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"started": "1"}, "is gone"),
        ({"machine": "another", "host": "far"}, "it runs on far: rft-train runs stacks there"),
    ],
)
def test_no_signal_goes_to_a_process_of_another_machine_or_with_a_number_that_was_used_again(
    run: Path, changed: dict[str, str], said: str
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stacks = StackDumps(0)
        stacks.attach(run)
        file = run / "logs" / "stacks_rank_0.txt"
        record = json.loads(file.read_text().removeprefix("process "))
        stacks.close()
        file.write_text(f"process {json.dumps(record | {'pid': child.pid} | changed)}\n")
        (found,) = request_stacks(run)
        assert said in found.missing
        assert child.poll() is None
    finally:
        child.communicate(b"\n")
    assert child.returncode == 0
