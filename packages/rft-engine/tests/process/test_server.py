"""The child's side: each request is answered by its method, and the process ends with its pipe or its parent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from rft_core.child_process import ParentPipes
from rft_core.errors import ServiceError
from rft_core.exact_records import value_of_line
from rft_engine.engine_base import EngineFacts
from rft_engine.process import server
from rft_engine.process.requests import GenerateCall, SampleResult, StepCounts
from rft_engine.process.server import EngineWorker, serve, serve_with

RESULT = SampleResult(0, [1], [-1.0], [0.0], "length", 3)
CALL = {"version": 3, "options": {}, "keys": [1], "prompts": [[1]], "requests": [[0, 0]]}


class Engine:
    """A started engine that keeps what it is asked."""

    facts = EngineFacts("float32", 7, True, "file")

    def __init__(self, settings: dict[str, Any]) -> None:
        self.asked: list[Any] = [settings]
        self.results: list[SampleResult | StepCounts] = [RESULT, RESULT, StepCounts(5, 6, 7), RESULT]

    def generate(self, call: GenerateCall, seconds: float) -> Iterator[SampleResult | StepCounts]:
        self.asked.append((call, seconds))
        yield from self.results

    def rpc(self, method: str, arguments: Sequence[Any] = (), seconds: float | None = None) -> list[Any]:
        self.asked.append((method, arguments, seconds))
        if method == "refuses":
            raise ServiceError(code="a.b", what="", where="", why="", do="")
        return [method]

    def serve(self, version: int) -> None:
        self.asked.append(("serve", version))

    def sleep(self, level: int) -> None:
        self.asked.append(("sleep", level))

    def wake(self, tags: list[str]) -> None:
        self.asked.append(("wake", tags))


class Pipes:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, line: bytes) -> None:
        self.sent.append(value_of_line(line))


@pytest.fixture
def worker() -> tuple[EngineWorker, Pipes]:
    pipes = Pipes()
    made = EngineWorker(pipes, Engine)  # type: ignore[arg-type]
    made.answer({"do": "start", "settings": {"a": 1}})
    return made, pipes


def test_each_request_reaches_the_engine_and_is_answered(worker: tuple[EngineWorker, Pipes]) -> None:
    made, pipes = worker
    made.answer({"do": "rpc", "method": "x", "arguments": [1]})
    made.answer({"do": "serve", "version": 4})
    made.answer({"do": "sleep", "level": 2})
    made.answer({"do": "wake", "tags": ["weights"]})
    facts = {"dtype": "float32", "vocab_size": 7, "is_cpu": True, "transport": "file"}
    assert pipes.sent == [{"reply": facts}, {"reply": ["x"]}, *[{"reply": None}] * 3]
    engine = made.engine
    assert isinstance(engine, Engine)
    assert engine.asked == [{"a": 1}, ("x", [1], None), ("serve", 4), ("sleep", 2), ("wake", ["weights"])]


def test_results_are_items_and_the_counts_the_reply(worker: tuple[EngineWorker, Pipes]) -> None:
    made, pipes = worker
    made.answer({"do": "generate", "within": 2.5, **CALL})
    item = {"item": json.loads(json.dumps(asdict(RESULT)))}
    assert pipes.sent[1:] == [item, item, {"reply": {"num_steps": 5, "num_prefill_tokens": 6, "num_preemptions": 7}}]
    engine = made.engine
    assert isinstance(engine, Engine)
    assert engine.asked[1:] == [(GenerateCall(**CALL), 2.5)]
    engine.results = [RESULT]
    with pytest.raises(AssertionError):
        made.answer({"do": "generate", "within": 2.5, **CALL})


def test_a_typed_error_is_the_only_answer_and_any_other_ends_the_worker(worker: tuple[EngineWorker, Pipes]) -> None:
    made, pipes = worker
    made.answer({"do": "rpc", "method": "refuses", "arguments": []})
    assert [answer["error"]["code"] for answer in pipes.sent[1:]] == ["a.b"]
    with pytest.raises(TypeError):
        made.answer({"do": "serve"})
    with pytest.raises(AssertionError):
        EngineWorker(Pipes(), Engine).answer({"do": "serve", "version": 1})  # type: ignore[arg-type]


class Ended(Exception):
    """The process would have ended here, with this code."""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The threads that are started, each with what it would run; an end of the process is an error here."""
    started: list[Any] = []

    class Thread:
        def __init__(self, **given: Any) -> None:
            self.given = given

        def start(self) -> None:
            started.append(self.given)

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(server, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(server.os, "_exit", end)
    return started


def through_pipes(monkeypatch: pytest.MonkeyPatch, requests: Sequence[dict[str, Any]], run: Any) -> list[Any]:
    """The lines that `run(read_fd, write_fd)` writes for these requests."""
    (read, to_worker), (from_worker, write) = os.pipe(), os.pipe()
    made: list[ParentPipes] = []

    def pipes_of(read_fd: int, write_fd: int) -> ParentPipes:
        made.append(ParentPipes(read_fd, write_fd))
        return made[0]

    monkeypatch.setattr(server, "ParentPipes", pipes_of)
    with os.fdopen(to_worker, "w") as file:
        file.writelines(json.dumps(request) + "\n" for request in requests)
    with pytest.raises(Ended) as caught:
        run(read, write)
    assert caught.value.args == (0,)
    made[0].requests.close()
    os.close(write)
    with os.fdopen(from_worker) as file:
        return [json.loads(line) for line in file]


def test_requests_are_answered_until_the_pipe_closes(watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [{"do": "start", "settings": {}}, {"do": "serve", "version": 2}]
    answers = through_pipes(monkeypatch, requests, lambda read, write: serve(read, write, Engine))
    assert [list(answer) for answer in answers] == [["reply"], ["reply"]]
    assert answers[0]["reply"]["vocab_size"] == 7


def test_the_process_ends_once_it_has_another_parent(watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.os, "getppid", lambda: 41)
    through_pipes(
        monkeypatch, [], lambda read, write: serve_with(read, write, lambda pipes: EngineWorker(pipes, Engine))
    )
    [thread] = watched
    assert thread["daemon"] is True
    assert thread["args"] == (41,)
    parents, waits = [41, 41, 1], list[float]()
    monkeypatch.setattr(server.os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(server, "time", SimpleNamespace(sleep=waits.append))
    with pytest.raises(Ended) as caught:
        thread["target"](*thread["args"])
    assert (caught.value.args, parents, len(waits)) == ((1,), [], 2)
