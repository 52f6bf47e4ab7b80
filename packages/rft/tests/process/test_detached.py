"""A process without its terminal: output that is dropped, and signals before and after a run has begun."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rft.process.detached import INTERRUPTED, LastingStream, open_standard_streams, outliving_terminal

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def test_what_can_be_written_is_written(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        stream = LastingStream(file)
        assert stream.write("abc") == 3
        stream.flush()
        assert (stream.error, stream.encoding, stream.fileno()) == (None, file.encoding, file.fileno())
    assert (tmp_path / "out").read_text() == "abc"


def test_after_a_write_that_fails_all_is_dropped_and_the_reason_is_kept() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    file = os.fdopen(writing, "w")
    stream = LastingStream(file)
    for _ in range(2):
        assert stream.write("abc") == 3
        stream.flush()
        assert stream.error is not None
        assert stream.error.errno == errno.EPIPE
    os.write(writing, b"a child process writes to the same file")
    file.close()


def test_a_write_that_fails_at_once_is_dropped_too() -> None:
    with open("/dev/full", "w") as file:
        stream = LastingStream(file)
        long = "a" * (4 * io.DEFAULT_BUFFER_SIZE)
        assert stream.write(long) == len(long)
        assert stream.error is not None
        assert stream.error.errno == errno.ENOSPC
        stream.flush()


def test_streams_and_handlers_are_put_back() -> None:
    before = sys.stdout, sys.stderr, *map(signal.getsignal, NUMBERS)
    with outliving_terminal(for_good=False):
        assert isinstance(sys.stdout, LastingStream)
        assert isinstance(sys.stderr, LastingStream)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert (sys.stdout, sys.stderr, *map(signal.getsignal, NUMBERS)) == before


def test_another_thread_changes_nothing() -> None:
    seen: list[object] = []

    def look() -> None:
        with outliving_terminal(for_good=False):
            seen.append((sys.stdout, signal.getsignal(signal.SIGHUP)))

    before = (sys.stdout, signal.getsignal(signal.SIGHUP))
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]


PROGRAM = """
import os, signal, sys
from rft.process.detached import outliving_terminal, run_has_begun
if sys.argv[1] == "an earlier one had begun":
    run_has_begun()
with outliving_terminal(for_good=True):
    if sys.argv[1] == "begun":
        run_has_begun()
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
sys.exit(75)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize(
    ("state", "begun"), [("begun", True), ("starting", False), ("an earlier one had begun", False)]
)
def test_a_stop_signal_ends_what_has_not_begun_and_spares_the_exit_code_of_what_has(
    name: str, state: str, begun: bool
) -> None:
    words = [sys.executable, "-c", PROGRAM, state, name]
    done = subprocess.run(words, check=False, timeout=60, stderr=subprocess.PIPE, text=True)
    assert done.returncode == (75 if begun else INTERRUPTED)
    line = f"stopped by {name} before the run began; the same command starts it again\n"
    assert done.stderr == ("" if begun else line)


def test_a_program_that_was_started_without_streams_has_some(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    open_standard_streams()
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        stream.write(f"to {name}, half of a pair \ud800\n")
        stream.flush()
    assert capfd.readouterr() == ("to stdout, half of a pair \\ud800\n", "to stderr, half of a pair \\ud800\n")


def test_streams_that_are_there_are_left_alone() -> None:
    before = sys.stdout, sys.stderr, [os.fstat(number) for number in (0, 1, 2)]
    open_standard_streams()
    assert before == (sys.stdout, sys.stderr, [os.fstat(number) for number in (0, 1, 2)])
