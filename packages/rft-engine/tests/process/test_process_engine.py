"""A library in a process of its own: the calls over its pipe, and what is done when it has died."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import RftError, ServiceError
from rft_engine.engine_base import EngineFacts
from rft_engine.process import process_engine as module
from rft_engine.process.backend_engine import Backend
from rft_engine.process.client import EngineDied
from rft_engine.process.process_engine import ProcessBackend, ProcessEngine
from rft_engine.process.requests import GenerateCall, SampleResult, StepCounts
from rft_engine.process.settings import EngineDeadlines, ExternalEngineSettings
from rft_engine.weight_sync.file_transport import Transport
from rft_engine.weight_sync.fingerprints import Fingerprint

VOCAB = 11
OPTIONS = SamplingOptions(temperature=0.8, max_new_tokens=2)
SETTINGS = ExternalEngineSettings(
    model_dir=Path("model"), max_rows=3, max_len=12, deadlines=EngineDeadlines(start=90.0, generate=50.0, other=7.0)
)
FACTS = {"dtype": "float32", "vocab_size": VOCAB, "is_cpu": True, "transport": "file"}
KEYS = [[10, 11, 12]]


def died(where: str = "") -> EngineDied:
    return EngineDied(code="engine.died", what="", where=where, why="", do="")


def error(code: str) -> ServiceError:
    return ServiceError(code=code, what="", where="", why="", do="")


def result(sample: int, token: int = 1) -> dict[str, Any]:
    return {
        "sample": sample,
        "token_ids": [token, token],
        "logprobs": [-1.0, -1.0],
        "log_kept_mass": [0.0, 0.0],
        "finish_reason": "length",
        "version": 0,
    }


class Process:
    """A process that keeps what it is asked; the class says what `start` raises."""

    made: list[Process]
    fails: BaseException | None

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.given = (command, environment, log_path)
        self.asked: list[Any] = []
        self.num_kills = 0
        self.pid, self.is_alive = 50 + len(self.made), True
        self.made.append(self)

    def call(self, operation: str, seconds: float, **fields: Any) -> Any:
        self.asked.append((operation, seconds, fields))
        if operation == "start" and self.fails is not None:
            raise self.fails
        return FACTS if operation == "start" else [operation]

    def stream(self, operation: str, seconds: float, **fields: Any) -> Generator[Any, None, Any]:
        self.asked.append((operation, seconds, fields))
        yield result(0)
        yield result(1)
        return {"num_steps": 3, "num_prefill_tokens": 4, "num_preemptions": None}

    def kill(self) -> None:
        self.num_kills += 1
        self.is_alive = False


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    Process.made, Process.fails = [], None
    monkeypatch.setattr(module, "EngineProcess", Process)
    return Process.made


def test_each_request_goes_out_with_its_fields_and_its_deadline(processes: list[Process]) -> None:
    backend = ProcessBackend(SETTINGS, ["run"], {"A": "b"}, Path("log"))
    [process] = processes
    assert process.given == (["run"], {"A": "b"}, Path("log"))
    assert (backend.facts, backend.pid, backend.is_alive) == (EngineFacts("float32", VOCAB, True, "file"), 50, True)
    [(operation, seconds, fields)] = process.asked
    assert (operation, seconds, fields["settings"]["model_dir"]) == ("start", 90.0, "model")
    assert fields["settings"]["deadlines"]["generate"] == 50.0
    process.asked = []
    call = GenerateCall(0, {"max_new_tokens": 2}, [1, 2], [[1]], [(0, 0), (1, 0)])
    assert list(backend.generate(call, 20.0)) == [
        SampleResult(**result(0)),
        SampleResult(**result(1)),
        StepCounts(3, 4),
    ]
    assert backend.rpc("x", (1, 2), 30.0) == ["rpc"]
    assert backend.rpc("y") == ["rpc"]
    backend.serve(3)
    backend.sleep(2)
    backend.wake(["weights"])
    own = {
        "version": 0,
        "options": {"max_new_tokens": 2},
        "keys": [1, 2],
        "prompts": [[1]],
        "requests": [(0, 0), (1, 0)],
        "budgets": (),
        "constraint": None,
        "media": (),
    }
    assert process.asked == [
        ("generate", 27.0, {"within": 20.0, **own}),
        ("rpc", 30.0, {"method": "x", "arguments": [1, 2]}),
        ("rpc", 7.0, {"method": "y", "arguments": []}),
        ("serve", 7.0, {"version": 3}),
        ("sleep", 7.0, {"level": 2}),
        ("wake", 7.0, {"tags": ["weights"]}),
    ]
    assert process.num_kills == 0
    backend.close()
    assert process.num_kills == 1


@pytest.mark.parametrize(
    ("fails", "known", "code"),
    [
        (died("log: out of memory"), error("engine.known"), "engine.known"),
        (died("log: out of memory"), None, "engine.died"),
        (error("engine.deadline"), error("engine.known"), "engine.deadline"),
        (KeyboardInterrupt(), None, None),
    ],
)
def test_a_start_that_fails_leaves_no_process_and_is_explained_where_it_can_be(
    processes: list[Process], fails: BaseException, known: RftError | None, code: str | None
) -> None:
    Process.fails = fails
    logs: list[str] = []

    def explain(log: str) -> RftError | None:
        logs.append(log)
        return known

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - an interrupt is one of them
        ProcessBackend(SETTINGS, ["run"], {}, Path("log"), explain)
    raised = caught.value
    assert raised is fails if code is None else isinstance(raised, RftError) and raised.problem.code == code
    assert processes[0].num_kills == 1
    assert logs == (["log: out of memory"] if isinstance(fails, EngineDied) else [])


class Library:
    """A backend that dies or answers garbage as its engine is told; token 1 + its number is what it draws."""

    facts = EngineFacts(**FACTS)

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine, self.number, self.is_alive = engine, number, True
        self.asked: list[Any] = []

    def _note(self, *entry: Any) -> None:
        self.asked.append(entry)
        self.engine.log.append((self.number, *entry))

    def generate(self, call: GenerateCall, seconds: float) -> Iterator[SampleResult | StepCounts]:
        self._note("generate", [sample for sample, _ in call.requests])
        for place, (sample, _) in enumerate(call.requests):
            if place == self.engine.dies_at:
                self.is_alive = False
                raise died()
            if self.engine.error is not None:
                raise self.engine.error
            fields = result(sample, 1 + self.number)
            fields["version"] = call.version
            yield SampleResult(**fields)
        yield StepCounts(3, 4)

    def rpc(self, method: str, arguments: Sequence[Any] = (), seconds: float | None = None) -> list[Any]:
        self._note(method)
        return [self.engine.held]

    def serve(self, version: int) -> None:
        self._note("serve", version)

    def sleep(self, level: int) -> None:
        self._note("sleep", level)
        if not self.is_alive:
            raise died()

    def wake(self, tags: list[str]) -> None:
        self._note("wake", tags)
        if self.engine.dies_on_wake:
            self.is_alive = False
            raise died()

    def close(self) -> None:
        self._note("close")
        self.is_alive = False


class Engine(ProcessEngine):
    """The engine on such libraries, started one after another; it is its own transport."""

    def __init__(self, **given: Any) -> None:
        self.log: list[Any] = []
        self.libraries: list[Library] = []
        self.dies_at: int | None = None
        self.dies_on_wake = False
        self.error: ServiceError | None = None
        self.send_errors: list[ServiceError] = []
        self.held: Fingerprint = {}
        self.source: Any = SimpleNamespace(sent={}, shapes={})
        self.sends: Fingerprint = {"a": "1"}
        options: dict[str, Any] = {"command": ["run"], "log_path": Path("log"), "max_restarts": 2} | given
        super().__init__(SETTINGS, self.source, **options)

    def _start(self) -> Backend:
        self.libraries.append(Library(self, len(self.libraries)))
        self.log.append(("start",))
        return self.libraries[-1]

    def _make_transport(self) -> Transport:
        self.log.append(("transport",))
        return self

    def send(self) -> list[Fingerprint]:
        self.log.append(("send",))
        if self.send_errors:
            raise self.send_errors.pop(0)
        self.source.sent = dict(self.sends)
        return [{}]

    def _plain_media(self, prompts: Any, media: Any) -> list[dict[str, Any] | None]:
        return []

    def taken(self) -> list[Any]:
        """The log since the last call of this method."""
        found, self.log = self.log, []
        return found


def tokens(engine: Engine) -> list[int]:
    [row] = engine.generate([[1]], KEYS, OPTIONS)
    return [one.token_ids[0] for one in row]


def loaded(number: int, version: int) -> list[Any]:
    return [("send",), (number, "rft_fingerprints"), (number, "serve", version)]


def renewed(number: int) -> list[Any]:
    """One process is ended before the next one starts."""
    return [(number, "close"), ("start",), ("transport",)]


def test_the_process_starts_with_what_the_engine_was_given(processes: list[Process], tmp_path: Path) -> None:
    class Plain(Engine):
        _start = ProcessEngine._start

    engine = Plain(environment={"A": "b"}, log_path=tmp_path / "log")
    assert processes[0].given == (("run",), {"A": "b"}, tmp_path / "log")
    assert (engine.log_path, engine.pid, engine.num_restarts) == (tmp_path / "log", 50, 0)
    other = Plain(log_path=None)
    assert processes[1].given[1] == {}
    assert other.log_path.name == "engine.log"
    assert other.log_path.parent.is_dir()
    other.log_path.parent.rmdir()


def test_finished_samples_of_a_dead_process_are_kept_and_the_others_drawn_by_the_next() -> None:
    engine = Engine()
    engine.dies_at = 1
    assert tokens(engine) == [1, 2, 3]
    assert engine.num_restarts == 2
    assert [library.asked[0] for library in engine.libraries] == [
        ("generate", [0, 1, 2]),
        ("generate", [1, 2]),
        ("generate", [2]),
    ]
    engine.dies_at = 0
    with pytest.raises(EngineDied):
        tokens(engine)
    assert engine.num_restarts == 4, "twice in one call, and then it is given up"
    engine.dies_at = None
    assert tokens(engine) == [6, 6, 6]
    assert engine.num_restarts == 5


def test_a_restart_loads_what_the_last_process_served() -> None:
    engine = Engine()
    engine.taken()
    engine.libraries[0].is_alive = False
    tokens(engine)
    assert engine.taken() == [*renewed(0), (1, "generate", [0, 1, 2])], "the model directory holds version 0"
    engine.load_weights(4)
    engine.taken()
    engine.libraries[1].is_alive = False
    tokens(engine)
    assert engine.taken() == [*renewed(1), *loaded(2, 4), (2, "generate", [0, 1, 2])]


def test_weights_that_were_trained_since_the_load_are_not_served_under_its_version() -> None:
    engine = Engine()
    engine.load_weights(4)
    engine.libraries[0].is_alive = False
    engine.sends = {"a": "2"}
    engine.taken()
    with pytest.raises(ServiceError) as caught:
        tokens(engine)
    assert caught.value.problem.code == "engine.logprob_parity"
    assert engine.taken() == [*renewed(0), *loaded(1, 4)[:2]]
    engine.libraries[1].is_alive = False
    engine.sends, engine.held = {"a": "1"}, {"a": "3"}
    with pytest.raises(ServiceError) as caught:
        tokens(engine)
    assert caught.value.problem.code == "engine.logprob_parity", "a restart is verified as a load is"


@pytest.mark.parametrize(("code", "ends"), [("engine.garbage", True), ("engine.deadline", False)])
def test_a_process_that_answers_garbage_is_ended(code: str, ends: bool) -> None:
    engine = Engine()
    engine.error = error(code)
    with pytest.raises(ServiceError) as caught:
        tokens(engine)
    assert caught.value is engine.error
    assert engine.libraries[0].is_alive is not ends
    assert engine.num_restarts == 0


def test_an_update_of_a_dead_process_goes_to_the_next_one() -> None:
    engine = Engine()
    engine.libraries[0].is_alive = False
    engine.taken()
    engine.load_weights(1)
    assert engine.taken() == [*renewed(0), *loaded(1, 1)]
    engine.send_errors = [died()]
    engine.load_weights(2)
    assert engine.taken() == [("send",), *renewed(1), *loaded(2, 2)]
    engine.send_errors = [died(), died()]
    with pytest.raises(EngineDied):
        engine.load_weights(3)
    assert (engine.num_restarts, engine.weight_version) == (3, 2)


def test_an_update_that_fails_ends_the_process_and_the_next_one_holds_what_was_served() -> None:
    engine = Engine()
    engine.load_weights(1)
    engine.taken()
    engine.send_errors = [error("engine.weights.incomplete")]
    with pytest.raises(ServiceError) as caught:
        engine.load_weights(2)
    assert caught.value.problem.code == "engine.weights.incomplete"
    assert engine.taken() == [("send",), (0, "close")]
    engine.load_weights(2)
    assert engine.taken() == [*renewed(0), *loaded(1, 2)]


def test_a_dead_process_sleeps_and_wakes_without_an_error_and_a_new_one_starts_awake() -> None:
    engine = Engine()
    engine.libraries[0].is_alive = False
    engine.taken()
    engine.sleep(1)
    engine.wake()
    assert engine.taken() == [(0, "sleep", 1)]
    tokens(engine)
    engine.sleep(1)
    engine.taken()
    engine.dies_on_wake = True
    engine.wake()
    assert engine.taken() == [(1, "wake", ["weights", "kv_cache"])]
    engine.dies_on_wake = False
    engine.sleep(1)
    engine.taken()
    engine.load_weights(1)
    engine.wake()
    assert engine.taken() == [*renewed(1), *loaded(2, 1)], "nothing of the new process sleeps"
