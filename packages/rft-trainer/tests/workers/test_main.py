"""The program of a scoring process, called in this one: its lines, its limits, and its last words."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from calls import call_payload

from rft_core.child_process import ParentPipes
from rft_core.errors import OptionsError
from rft_trainer.workers import main as program

MIB = 2**20


@dataclass
class Pool:
    """The other side of the pipes of a scoring process."""

    requests: int
    replies: int
    pipes: ParentPipes

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in os.read(self.replies, 1 << 16).splitlines()]

    def ask(self, *requests: object) -> None:
        """Send all requests there are to be."""
        os.write(self.requests, b"".join(json.dumps(request).encode() + b"\n" for request in requests))
        os.close(self.requests)


@pytest.fixture
def pool() -> Iterator[Pool]:
    read, requests = os.pipe()
    replies, write = os.pipe()
    pool = Pool(requests, replies, ParentPipes(read, write))
    yield pool
    pool.pipes.requests.close()
    for end in (requests, replies, write):
        with suppress(OSError):
            os.close(end)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """The alarms that were set."""
    found: list[tuple[int, float]] = []
    monkeypatch.setattr(program.signal, "setitimer", lambda which, seconds: found.append((which, seconds)))
    return found


def peaks(monkeypatch: pytest.MonkeyPatch, *values: int) -> None:
    following = iter(values)
    monkeypatch.setattr(program, "_peak_memory", lambda: next(following))


def answered(pool: Pool, memory: int = 0, result: Any = (1.0, None)) -> dict[str, Any]:
    request = {"id": 7, "alarm": 12.5, "payload": {"a": 1}}
    program._answer(request, lambda payload: [payload["a"], *result], pool.pipes, memory)
    [reply] = pool.lines()
    return reply


def test_an_answer_has_the_number_of_its_question_and_its_time_is_limited(
    pool: Pool, timers: list[tuple[int, float]]
) -> None:
    assert answered(pool) == {"id": 7, "result": [1, 1.0, None], "last": False}
    assert timers == [(signal.ITIMER_REAL, 12.5), (signal.ITIMER_REAL, 0.0)]
    assert program._current_id is None


@pytest.mark.usefixtures("timers")
@pytest.mark.parametrize(
    ("before", "peak", "last"), [(400, 500, False), (400, 501, True), (501, 501, True), (0, 250, False)]
)
def test_a_process_that_has_taken_half_of_its_memory_gives_its_last_answer(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, before: int, peak: int, last: bool
) -> None:
    peaks(monkeypatch, before * MIB, peak * MIB)
    assert answered(pool, 1000 * MIB)["last"] is last
    peaks(monkeypatch, 0, 10**12)
    assert answered(pool)["last"] is False, "no limit"


@pytest.mark.usefixtures("timers")
def test_an_answer_that_takes_a_fourth_of_the_memory_is_not_trusted(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks(monkeypatch, 100 * MIB, 351 * MIB)
    with pytest.raises(MemoryError, match=r"251 MiB.* 1000 MiB"):
        answered(pool, 1000 * MIB)
    assert program._current_id == 7, "the last words name the question"


def test_the_peak_of_this_process_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    assert program._peak_memory() == pytest.approx(int(line.split()[1]) * 1024, rel=0.1)
    real = open
    stand = tmp_path / "status"
    monkeypatch.setattr("builtins.open", lambda path, **options: real(stand, **options))
    assert program._peak_memory() == 0, "no such file"
    stand.write_text("VmPeak:  10 kB\n")
    assert program._peak_memory() == 0
    stand.write_text("VmPeak:  10 kB\nVmHWM:  20 kB\nVmRSS: 30 kB\n")
    assert program._peak_memory() == 20 * 1024


def test_the_last_words_say_what_was_raised_and_where(
    pool: Pool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_current_id", 9)
    hook = program._last_words(pool.pipes, " (hint)")
    try:
        raise ValueError("x" * 5000)
    except ValueError as error:
        hook(type(error), error, error.__traceback__)
        line = error.__traceback__.tb_lineno if error.__traceback__ else 0
    [said] = pool.lines()
    assert said["id"] == 9
    assert said["error"].startswith("ValueError: ")
    assert len(said["error"]) == 2000
    assert said["place"] == f"{__file__}:{line}"
    assert said["traceback"].startswith("Traceback")
    assert "exit" not in said
    assert "ValueError" in capsys.readouterr().err


def test_a_task_is_its_kind_with_a_file_and_a_name(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own:x.py").write_text("def reward_fn(responses, labels): return [2.0 for _ in responses]\n")
    handler = program._load_task(f"file:{tmp_path}/own:x.py:reward_fn", pool.pipes)
    assert handler(call_payload("a", "b")) == [2.0, 2.0]
    with pytest.raises(SystemExit) as left:
        program._load_task("file:none.py:reward_fn", pool.pipes)
    assert left.value.code == 0
    [refused] = pool.lines()
    assert refused["refused"]["kind"] == OptionsError.__name__
    assert refused["refused"]["code"] == "reward.file_missing"


def test_a_result_that_is_no_json_is_an_error_here(pool: Pool) -> None:
    with pytest.raises(ValueError, match="JSON"):
        program._send(pool.pipes, {"a": float("nan")})


def test_the_program_sets_its_limits_says_that_it_is_ready_and_answers_until_the_end(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, timers: list[tuple[int, float]]
) -> None:
    limits: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(program.resource, "setrlimit", lambda which, pair: limits.append((which, pair)))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    questions = [{"id": number, "alarm": 1.0, "payload": {"x": number}} for number in (1, 2)]
    pool.ask(*questions)
    monkeypatch.setattr(program, "_load_task", lambda task, pipes: lambda payload: [task, payload["x"]])
    before = sys.excepthook
    program.main("kind", 1 << 40, 1 << 39, pool.pipes)
    assert sys.excepthook is not before
    ready, first, second = pool.lines()
    assert ready == {"ready": True}
    assert (first["id"], first["result"]) == (1, ["kind", 1])
    assert (second["id"], second["result"]) == (2, ["kind", 2])
    data = (resource.RLIMIT_DATA, (1 << 39, 1 << 39))
    assert limits == [(resource.RLIMIT_CORE, (0, 0)), (resource.RLIMIT_AS, (1 << 40, 1 << 40)), data]
    assert len(timers) == 4
    limits.clear()
    program.main("kind", 0, 0, pool.pipes)
    assert limits == [(resource.RLIMIT_CORE, (0, 0))]
