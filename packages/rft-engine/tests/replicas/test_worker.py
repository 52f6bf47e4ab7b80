"""A replica's own process, its worker in this one: what each request does, and when signs of life are sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.exact_records import value_of_line
from rft_engine.lifecycle import EngineState
from rft_engine.native.engine import NativeEngine
from rft_engine.replicas import worker as module
from rft_engine.replicas.interrupt_flag import InterruptFlag
from rft_engine.replicas.worker import LocalReplica, ReplicaModel, ReplicaWorker, named, serve_replica
from rft_engine.testing.replica_worker import CARRY, VOCAB, FakeMedia, number_of, table_of
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel
from rft_engine.weight_sync.fingerprints import element_digest
from rft_engine.weight_sync.shared_images import SharedImageStore
from rft_engine.weight_sync.weight_file import write_weight_file

OPTIONS = SamplingOptions(temperature=1.0, max_new_tokens=6, stop_token_ids=(0,))


class Pipes:
    """What the worker sends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, line: bytes) -> None:
        self.sent.append(value_of_line(line))


class Side:
    """A worker on a table model, its pipes, and the model that it made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pipes = folder, Pipes()
        self.model = FakeDecodableModel(torch.full((11, VOCAB), torch.nan), carry=CARRY)
        self.given: list[dict[str, Any]] = []
        self.worker = ReplicaWorker(self.pipes, self._made)  # type: ignore[arg-type]
        self.flag = InterruptFlag.create()

    def _made(self, settings: dict[str, Any]) -> ReplicaModel:
        self.given.append(settings)
        return ReplicaModel(self.model, {"table": self.model.log_SV}, "float32", "cpu", number_of)

    def ask(self, **request: Any) -> list[Any]:
        """The worker's messages in answer to a request."""
        self.pipes.sent = []
        self.worker.answer(request)
        return self.pipes.sent

    def start(self, max_rows: int = 4, max_len: int = 64) -> list[Any]:
        return self.ask(do="start", model={"a": 1}, max_rows=max_rows, max_len=max_len, flag=str(self.flag.path))

    def load(self, version: int, **tensors: Tensor) -> list[Any]:
        path = self.folder / f"{version}.safetensors"
        write_weight_file(path, (tensors or {"table": table_of(version)}).items())
        return self.ask(do="load", path=str(path), version=version)

    def draw(self, number: int = 1, **fields: Any) -> list[Any]:
        call = {
            "prefixes": [[1], [2, 3], [1]],
            "keys": [5, 6, 7],
            "starts": [0, 0, 0],
            "budgets": [6, 6, 6],
            "options": asdict(OPTIONS),
        }
        return self.ask(do="draw", number=number, **(call | fields))


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    made = Side(tmp_path)
    yield made
    made.flag.unlink()


def expected(version: int, prompts: Sequence[Sequence[int]], media: Sequence[int] | None = None) -> list[list[int]]:
    """Tokens that one engine draws with keys 5, 6 and 7."""
    engine = NativeEngine(FakeDecodableModel(table_of(version), carry=CARRY), max_rows=9, max_len=64)
    keys = [[5 + place] for place in range(len(prompts))]
    return [list(one.token_ids) for [one] in engine.generate(prompts, keys, OPTIONS, media=media)]


def test_a_start_answers_with_the_facts_and_a_draw_with_results_and_figures(side: Side) -> None:
    facts = {"dtype": "float32", "vocab_size": VOCAB, "is_cpu": True, "transport": "file"}
    assert side.start() == [{"reply": facts}]
    assert side.given == [{"a": 1}]
    digest = element_digest(table_of(3), (11, VOCAB), torch.float32)
    assert side.load(3) == [{"reply": {"table": digest}}]
    assert torch.equal(side.model.log_SV, table_of(3))
    *items, last = side.draw()
    found = {one["item"]["request"]: one["item"] for one in items}
    assert [found[request]["token_ids"] for request in range(3)] == expected(3, [[1], [2, 3], [1]])
    assert {one["weight_version"] for one in found.values()} == {3}
    assert last["reply"]["num_generated_tokens"] == sum(len(one["token_ids"]) for one in found.values())
    assert last["reply"]["rows"] == 3


def test_rows_and_length_are_those_of_the_start(side: Side) -> None:
    side.start(max_rows=2, max_len=8)
    side.load(1)
    side.draw()
    assert [shape for name, shape in side.model.calls if name == "new_cache"] == [(2, 8)]
    [answer] = side.draw(prefixes=[[1] * 3] * 3)
    assert answer["error"]["code"] == "engine.prompt_too_long"


def test_every_load_drops_the_cache_and_the_same_version_may_come_again(side: Side) -> None:
    side.start()
    for version, refreshes in ((3, 1), (3, 2), (4, 3), (2, 4)):
        assert "reply" in side.load(version)[0]
        assert side.model.num_refreshes == refreshes
        assert side.draw()[-2]["item"]["weight_version"] == max(version, 4 if refreshes == 4 else version)
        assert [name for name, _ in side.model.calls].count("new_cache") == refreshes


def test_a_sleeping_replica_is_loaded_without_being_woken(side: Side) -> None:
    side.start()
    side.load(1)
    assert side.ask(do="sleep", level=2) == [{"reply": None}]
    engine = side.worker.replica.engine
    assert engine.state is EngineState.ASLEEP
    side.load(2)
    assert engine.state is EngineState.ASLEEP
    assert side.draw()[0]["error"]["code"] == "engine.state"
    assert side.ask(do="wake") == [{"reply": None}]
    assert engine.state is EngineState.READY
    assert side.draw()[-2]["item"]["weight_version"] == 2
    side.ask(do="sleep", level=2)
    side.ask(do="wake")
    assert side.draw()[0]["error"]["code"] == "engine.state", "level 2 gave the weights up"


@pytest.mark.parametrize(
    "tensors",
    [
        {"other": torch.zeros(11, VOCAB)},
        {"table": torch.zeros(11, VOCAB), "more": torch.zeros(1)},
        {"table": torch.zeros(11, 1)},
        {"table": torch.zeros(VOCAB, 11)},
    ],
)
def test_tensors_that_are_not_the_models_are_refused_and_nothing_is_written(
    side: Side, tensors: dict[str, Tensor]
) -> None:
    side.start()
    side.load(1)
    [answer] = side.load(2, **tensors)
    assert answer["error"]["code"] == "engine.weights.incomplete"
    assert torch.equal(side.model.log_SV, table_of(1))
    assert side.worker.replica.engine.weight_version == 1


def test_images_reach_the_model_beside_their_prompts(side: Side) -> None:
    side.start()
    side.load(1)
    store = SharedImageStore()
    try:
        shown = store.hold([FakeMedia.of(3), FakeMedia.of(1, 4)])
        *items, _ = side.draw(prefixes=[[1]] * 3, media=[1, -1, 0], shown=shown)
    finally:
        store.close()
    found = {one["item"]["request"]: one["item"]["token_ids"] for one in items}
    wanted = expected(1, [[1]] * 3, [5, 0, 3])
    assert [found[request] for request in range(3)] == wanted
    assert wanted != expected(1, [[1]] * 3)


def test_a_call_ends_once_its_number_is_reached(side: Side) -> None:
    side.start()
    side.load(1)
    side.flag.set(4)
    reasons = {number: {one["item"]["finish_reason"] for one in side.draw(number)[:-1]} for number in (4, 5)}
    assert reasons[4] == {"interrupted"}
    assert "interrupted" not in reasons[5]


@pytest.mark.parametrize(("step", "signs"), [(0.25, 1), (0.5, 2), (0.75, 4), (0.125, 0)])
def test_signs_of_life_are_more_than_a_second_apart(
    side: Side, monkeypatch: pytest.MonkeyPatch, step: float, signs: int
) -> None:
    side.start()
    side.load(1)
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    flag = side.worker._flag  # pyright: ignore[reportPrivateUsage]
    assert flag is not None
    looks: list[int] = []

    def reached(number: int) -> bool:
        looks.append(number)
        now[0] += step
        return len(looks) >= 8

    monkeypatch.setattr(flag, "reached", reached)
    messages = side.draw(9, options=asdict(SamplingOptions(temperature=1.0, max_new_tokens=6)))
    assert looks == [9] * 9
    assert messages.count({"item": None}) == signs
    assert [one["item"]["finish_reason"] for one in messages[:-1] if one["item"]] == ["length"] * 3


class Told(Exception):
    """The device that a prompt came on."""


class Telling(FakeDecodableModel):
    def prefill(self, cache: FakeCache, token_ids_PL: Tensor, *rest: Any) -> Tensor:
        raise Told(token_ids_PL.device.type)


def test_the_engine_is_on_the_device_of_its_model() -> None:
    replica = LocalReplica(ReplicaModel(Telling(torch.zeros(2, 5)), {}, "bfloat16", "meta"), 3, 9)
    assert asdict(replica.facts) == {"dtype": "bfloat16", "vocab_size": 5, "is_cpu": False, "transport": "file"}
    with pytest.raises(Told, match="meta"):
        replica.engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=2))


def test_serving_makes_a_worker_on_the_two_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(module, "serve_with", lambda *given: calls.append(given))
    pipes = Pipes()
    made: list[Any] = []

    def make_model(settings: dict[str, Any]) -> ReplicaModel:
        made.append(settings)
        return ReplicaModel(FakeDecodableModel(torch.zeros(2, 5)), {}, "float32", "cpu")

    serve_replica(3, 4, make_model)
    [(read_fd, write_fd, make_worker)] = calls
    assert (read_fd, write_fd) == (3, 4)
    flag = InterruptFlag.create()
    make_worker(pipes).answer({"do": "start", "model": {"b": 2}, "max_rows": 1, "max_len": 4, "flag": str(flag.path)})
    flag.unlink()
    assert made == [{"b": 2}]
    assert pipes.sent[0]["reply"]["vocab_size"] == 5


def test_a_load_may_write_into_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    found = named(iter([("w", parameter)]))
    assert not found["w"].requires_grad
    found["w"].zero_()
    assert parameter.tolist() == [0.0, 0.0]
