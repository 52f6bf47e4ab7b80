"""Requests to a child process by a clock that is moved by hand: deadlines, deaths, items, and the end of its log."""

from __future__ import annotations

import base64
import json
import struct
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_core.child_process import error_fields
from rft_core.errors import OptionsError, ServiceError
from rft_engine.process import client
from rft_engine.process.client import EngineDied, EngineProcess


class Child(EngineProcess):
    """A process that is none: `steps` says what happens in each wait for it, which may take seconds."""

    def __init__(self, log_path: Path, now: list[float]) -> None:
        self.lines, self.has_ended, self.alive = deque[bytearray](), False, True
        self.sent: list[Any] = []
        self.num_unsent = 0
        self.kills: list[float] = []
        self.steps: list[Callable[[], bool]] = []
        self.now, self._log_path = now, log_path

    @property
    def pid(self) -> int:
        return 77

    @property
    def is_alive(self) -> bool:
        return self.alive

    @property
    def is_sending(self) -> bool:
        return self.num_unsent > 0

    def send(self, line: bytes) -> None:
        self.sent.append(json.loads(line))

    def kill(self, grace: float = 0.0) -> str:
        self.kills.append(grace)
        self.alive = False
        return "ended"

    def then(self, *messages: Any, after: float = 0.0, dies: bool = False) -> None:
        """In the next wait, which takes `after` seconds, these messages come, and the process may die."""

        def step() -> bool:
            self.now[0] += after
            self.lines.extend(bytearray(json.dumps(message).encode()) for message in messages)
            self.alive = self.alive and not dies
            return bool(messages)

        self.steps.append(step)

    def sends(self, *rests: int, after: float = 0.0) -> None:
        """In the next waits, of `after` seconds each, so much stays unsent."""

        def step_of(rest: int) -> Callable[[], bool]:
            def step() -> bool:
                self.now[0] += after
                self.num_unsent = rest
                return True

            return step

        self.steps += [step_of(rest) for rest in rests]


class Patient(Child):
    renews_deadline = True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    times = [100.0]
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: times[0]))

    def wait(children: Sequence[Child], seconds: float) -> bool:
        [child] = children
        assert child.steps, "it waits for what never comes"
        return child.steps.pop(0)()

    monkeypatch.setattr(client, "wait_for_any", wait)
    return times


@pytest.fixture
def child(tmp_path: Path, now: list[float]) -> Child:
    return Child(tmp_path / "log", now)


def code_of(ask: Callable[[], Any]) -> str:
    with pytest.raises(ServiceError) as caught:
        ask()
    return caught.value.problem.code


def test_a_call_sends_its_fields_and_returns_the_reply(child: Child) -> None:
    assert not EngineProcess.renews_deadline
    child.then({"item": 1})
    child.then({"item": 2}, {"reply": {"a": 3}}, {"reply": "of the next request"})
    assert child.call("load", 5.0, path="x", version=2) == {"a": 3}
    assert child.sent == [{"do": "load", "path": "x", "version": 2}]
    assert child.call("next", 5.0) == "of the next request"
    assert child.kills == []


def test_a_stream_hands_items_out_and_returns_the_reply(child: Child) -> None:
    child.then({"item": 1}, {"item": None})
    child.then({"item": [2]})
    child.then({"reply": 9})
    items, replies = list[Any](), list[Any]()

    def hand_out() -> Generator[Any, None, None]:
        replies.append((yield from child.stream("draw", 5.0, number=4)))

    items += hand_out()
    assert (items, replies) == ([1, None, [2]], [9])
    assert child.sent == [{"do": "draw", "number": 4}]


def test_a_typed_error_of_the_child_is_raised_and_the_child_lives(child: Child) -> None:
    error = OptionsError(code="a.b", what="found", where="there", why="rule", state="unchanged", do="this")
    child.then({"error": error_fields(error)}, {"reply": 1})
    with pytest.raises(OptionsError) as caught:
        child.call("x", 5.0)
    assert caught.value.problem == error.problem
    assert (child.kills, child.is_alive) == ([], True)


def test_a_child_that_is_silent_past_the_deadline_is_ended(child: Child, now: list[float]) -> None:
    child.then(after=3.0)
    child.then(after=2.0)
    child.then(after=0.5)
    assert code_of(lambda: child.call("x", 5.0)) == "engine.deadline"
    assert (now, child.kills, child.steps) == ([105.5], [0.0], [])


def test_an_answer_that_is_there_counts_also_after_the_deadline(child: Child) -> None:
    child.then({"reply": 7}, after=60.0)
    assert child.call("x", 5.0) == 7


def test_every_message_renews_the_deadline_where_only_silence_counts(tmp_path: Path, now: list[float]) -> None:
    child = Patient(tmp_path / "log", now)
    for _ in range(4):
        child.then({"item": None}, after=3.0)
    child.then({"reply": 7}, after=3.0)
    assert child.call("x", 5.0) == 7
    child.then({"item": None}, after=3.0)
    child.then(after=5.0)
    child.then(after=0.1)
    assert code_of(lambda: child.call("x", 5.0)) == "engine.deadline"
    impatient = Child(tmp_path / "log", now)
    impatient.then({"item": None}, after=3.0)
    impatient.then(after=2.5)
    assert code_of(lambda: impatient.call("x", 5.0)) == "engine.deadline"


def test_a_request_that_is_not_read_is_bounded_by_the_deadline(child: Child) -> None:
    child.num_unsent = 10
    child.sends(5, 2, 1, 0, after=1.25)
    child.then({"reply": 7})
    assert child.call("x", 5.0) == 7
    child.num_unsent = 10
    child.sends(5, 2, after=2.6)
    assert code_of(lambda: child.call("x", 5.0)) == "engine.deadline"
    assert child.steps == []


@pytest.mark.parametrize("how", ["has_ended", "alive"])
def test_a_child_that_is_gone_while_it_is_sent_a_request_has_died(child: Child, how: str) -> None:
    child.num_unsent = 10
    setattr(child, how, how == "has_ended")
    assert code_of(lambda: child.call("x", 5.0)) == "engine.died"
    assert child.kills == [5.0], "it may still be writing down why"


def test_what_a_dead_child_has_sent_is_read_before_its_death_is_noticed(child: Child) -> None:
    child.then({"item": 1}, dies=True)
    child.then({"item": 2})
    child.then()
    stream = child.stream("x", 5.0)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(EngineDied) as caught:
        next(stream)
    assert caught.value.problem.code == "engine.died"
    assert child.steps == []


def test_a_closed_pipe_is_a_death_once_its_lines_are_used(child: Child) -> None:
    child.has_ended = True
    child.lines.append(bytearray(b'{"item": 1}'))
    stream = child.stream("x", 5.0)
    assert next(stream) == 1
    with pytest.raises(EngineDied):
        next(stream)


ONE = base64.b64encode(struct.pack("<d", 1.5))
FLOATS_ASTRAY = [
    b'{"item": 1.5}',
    b'{"item": NaN}',
    b'{"item": 1}\t' + ONE,
    b'{"item": [0.0, 0.0]}\t' + ONE,
    b'{"item": 0.0}\t' + ONE[:-4],
    b'{"item": 0.0}\t\xff',
    b'{"item": 0.0}\t' + ONE + b"\t",
]


@pytest.mark.parametrize(
    "line", [b"no json", b"[1]", b'["item"]', b'"item"', b"{}", b'{"other": 1}', b"\xff\xfe", *FLOATS_ASTRAY]
)
def test_a_line_that_is_no_message_is_garbage(child: Child, line: bytes) -> None:
    child.lines.append(bytearray(line))
    assert code_of(lambda: child.call("x", 5.0)) == "engine.garbage"


@pytest.mark.parametrize(
    ("written", "end"),
    [
        (None, "(no log)"),
        (b"", "(empty)"),
        (b"\n \n", "(empty)"),
        (b"one\ntwo\n", "one | two"),
        (b"\n".join(b"%d" % number for number in range(12)), "4 | 5 | 6 | 7 | 8 | 9 | 10 | 11"),
        (b"a" * 500 + b"b" * 2000, "b" * 2000),
    ],
)
def test_a_death_quotes_the_end_of_the_log(child: Child, tmp_path: Path, written: bytes | None, end: str) -> None:
    if written is not None:
        (tmp_path / "log").write_bytes(written)
    child.has_ended = True
    with pytest.raises(EngineDied) as caught:
        child.call("x", 5.0)
    assert caught.value.problem.where.endswith(f"ends: {end}")
