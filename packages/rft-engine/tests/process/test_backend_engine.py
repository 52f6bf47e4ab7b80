"""An engine over a library: the call that goes out, the figures that come back, updates in their order, and sleep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError, ServiceError
from rft_engine.completions import EngineStats
from rft_engine.engine_base import EngineFacts
from rft_engine.lifecycle import EngineState
from rft_engine.process import backend_engine as module
from rft_engine.process.backend_engine import Backend, BackendEngine
from rft_engine.process.requests import GenerateCall, SampleResult, StepCounts
from rft_engine.process.settings import EngineDeadlines, ExternalEngineSettings
from rft_engine.weight_sync.file_transport import Transport
from rft_engine.weight_sync.fingerprints import Fingerprint

VOCAB = 11
OPTIONS = SamplingOptions(temperature=0.8, max_new_tokens=4, stop_token_ids=(0,), min_new_tokens=1)
SETTINGS = ExternalEngineSettings(
    model_dir=Path("model"), max_rows=3, max_len=12, deadlines=EngineDeadlines(generate=50.0, other=7.0)
)


class Library:
    """A backend that keeps what it is asked; a sample gets its whole budget of token 1, or what `answer` says."""

    facts = EngineFacts("float32", VOCAB, True, "file")
    is_alive = True

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.calls: list[GenerateCall] = []
        self.held: list[Fingerprint] = [{"a": "1"}]
        self.counts: StepCounts | None = StepCounts(4, 9, 2)
        self.answer: list[list[int]] = []

    def generate(self, call: GenerateCall, seconds: float) -> Iterator[SampleResult | StepCounts]:
        self.calls.append(call)
        self.log.append(("generate", seconds))
        for sample, _ in reversed(call.requests):
            tokens = self.answer[sample] if self.answer else [1] * call.budget(sample)
            num = len(tokens)
            reason = "stop" if call.constraint is not None or tokens[-1] == 0 else "length"
            yield SampleResult(sample, tokens, [-1.0] * num, [0.0] * num, reason, call.version)
        if self.counts is not None:
            yield self.counts

    def rpc(self, method: str, arguments: Sequence[Any] = (), seconds: float | None = None) -> list[Any]:
        self.log.append((method, list(arguments), seconds))
        return self.held

    def serve(self, version: int) -> None:
        self.log.append(("serve", version))

    def sleep(self, level: int) -> None:
        self.log.append(("sleep", level))

    def wake(self, tags: list[str]) -> None:
        self.log.append(("wake", tags))

    def close(self) -> None:
        self.log.append(("close",))


class Engine(BackendEngine):
    """The engine on such a library, which is its own transport too."""

    def __init__(self, settings: ExternalEngineSettings = SETTINGS) -> None:
        self.library = Library()
        self.received: list[Fingerprint] = []
        self.fails_to_send: Exception | None = None
        source: Any = SimpleNamespace(sent={"a": "1"}, shapes={"a": [3]})
        super().__init__(settings, source)

    def _start(self) -> Backend:
        return self.library

    def _make_transport(self) -> Transport:
        return self

    def send(self) -> list[Fingerprint]:
        self.library.log.append(("send",))
        if self.fails_to_send is not None:
            raise self.fails_to_send
        return self.received

    def _plain_media(
        self, prompts: Sequence[Sequence[int]], media: Sequence[object | None] | None
    ) -> list[dict[str, Any] | None]:
        return [{"of": tuple(prompt), "is": one} for prompt, one in zip(prompts, media or (), strict=False)]

    def taken(self) -> list[Any]:
        """The log since the last call of this method."""
        found, self.library.log = self.library.log, []
        return found


PROMPTS, KEYS = [(1, 2), (3,), (4,)], [[10, 11], [], [12]]


def test_a_call_carries_all_that_was_asked_and_completions_come_in_its_order() -> None:
    engine = Engine()
    engine.load_weights(5)
    engine.taken()
    engine.library.answer = [[1, 2, 3, 4], [5, 0], [6, 7]]
    found = engine.generate(PROMPTS, KEYS, OPTIONS, budgets=[[4, 3], [], [2]], media=["x", None, "y"])
    assert [[one.token_ids for one in row] for row in found] == [[(1, 2, 3, 4), (5, 0)], [], [(6, 7)]]
    assert [[one.finish_reason for one in row] for row in found] == [["length", "stop"], [], ["length"]]
    assert engine.library.calls == [
        GenerateCall(
            version=5,
            options=asdict(OPTIONS),
            keys=[10, 11, 12],
            prompts=[[1, 2], [3], [4]],
            requests=[(0, 0), (1, 0), (2, 2)],
            budgets=[4, 3, 2],
            constraint=None,
            media=[{"of": (1, 2), "is": "x"}, {"of": (3,), "is": None}, {"of": (4,), "is": "y"}],
        )
    ]
    assert engine.taken() == [("generate", 50.0)]
    assert (engine.facts, engine.max_len) == (Library.facts, 12)


def test_a_constraint_sets_the_budgets_and_what_ends_a_sequence() -> None:
    engine = Engine()
    trie = TokenTrie.of([[1, 2, 3], [1, 5]])
    engine.library.answer = [[1, 2, 3], [1, 5], [1, 5]]
    options = replace(OPTIONS, stop_token_ids=(), max_new_tokens=8)
    found = engine.generate(PROMPTS, KEYS, options, constraint=trie)
    assert [[one.token_ids for one in row] for row in found] == [[(1, 2, 3), (1, 5)], [], [(1, 5)]]
    [call] = engine.library.calls
    assert (call.budgets, call.constraint) == ([3, 3, 3], trie.as_lists())
    assert call.options == asdict(options) | {"stop_token_ids": (3, 5), "min_new_tokens": 0}
    engine.library.answer = [[1, 2, 3], [1, 2, 5], [1, 5]]
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, options, constraint=trie)
    assert caught.value.problem.code == "engine.constraint.not_whole"
    with pytest.raises(OptionsError) as refused:
        engine.generate(PROMPTS, KEYS, replace(options, max_new_tokens=2), constraint=trie)
    assert refused.value.problem.code.startswith("engine.constraint")


def test_figures_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    times = count(100.0, 1.5)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    engine.library.answer = [[1, 1, 1, 1], [0], [1, 0]]
    engine.generate(PROMPTS, KEYS, OPTIONS)
    assert engine.stats() == EngineStats(
        num_generated_tokens=7,
        num_prefill_tokens=9,
        num_decode_steps=4,
        mean_occupancy=7 / 12,
        tail_ratio=2.0,
        seconds=1.5,
        num_preemptions=2,
        rows=3,
        rows_asked=3,
    )
    engine.library.answer = []
    engine.library.counts = StepCounts(2, 1)
    engine.generate([[1]], [list(range(8))], OPTIONS)
    assert (engine.stats().rows, engine.stats().mean_occupancy) == (3, 1.0), "several tokens a step count as a full one"
    assert engine.stats().num_preemptions is None
    engine.library.counts = None
    engine.generate([[1]], [[1, 2]], OPTIONS)
    stats = engine.stats()
    assert (stats.num_decode_steps, stats.num_prefill_tokens, stats.mean_occupancy, stats.rows) == (0, 0, 0.0, 2)
    assert engine.generate([[1]], [[]], OPTIONS) == [[]]
    assert engine.stats() == EngineStats()
    assert len(engine.library.calls) == 3, "nothing is asked for where there is no sample"


@pytest.mark.parametrize(
    ("prompts", "keys", "given", "code"),
    [
        ([[1]], [], {}, "engine.sample_keys"),
        ([[VOCAB]], [[1]], {}, "engine.unknown_token"),
        ([[1] * 9], [[1]], {}, "engine.prompt_too_long"),
        ([[1], [2]], [[1], [2]], {"media": ["x"]}, "engine.media"),
        ([[1]], [[1]], {"budgets": [[5]]}, "engine.budgets"),
        ([[1]], [[1]], {"options": replace(OPTIONS, stop_token_ids=(VOCAB,))}, "engine.sampling_option"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompts: Any, keys: Any, given: dict[str, Any], code: str) -> None:
    engine = Engine()
    fields: dict[str, Any] = {"options": OPTIONS} | given
    with pytest.raises(OptionsError) as caught:
        engine.generate(prompts, keys, **fields)
    assert caught.value.problem.code == code
    assert engine.library.calls == []
    engine.generate([[1] * 8], [[1]], OPTIONS)


def loaded(version: int) -> list[Any]:
    """What an update of the weights asks of a library that is awake."""
    return [("send",), ("rft_fingerprints", [{"a": [3]}], 7.0), ("serve", version)]


def test_an_update_sends_verifies_and_serves_and_is_refused_before_anything_moves() -> None:
    engine = Engine()
    engine.refresh()
    assert (engine.taken(), engine.weight_version) == (loaded(0), 0)
    engine.load_weights(3)
    assert (engine.taken(), engine.weight_version) == (loaded(3), 3)
    engine.refresh()
    assert (engine.taken(), engine.weight_version) == (loaded(3), 3)
    for version in (3, 2):
        with pytest.raises(ServiceError) as caught:
            engine.load_weights(version)
        assert caught.value.problem.code == "engine.weights.not_newer"
    assert engine.taken() == []
    engine.close()
    engine.close()
    assert (engine.taken(), engine.state) == ([("close",)], EngineState.CLOSED)
    for ask in (engine.refresh, lambda: engine.load_weights(9)):
        with pytest.raises(ServiceError) as caught:
            ask()
        assert caught.value.problem.code == "engine.state"
    assert engine.taken() == []


@pytest.mark.parametrize("fault", ["read", "held", "send"])
def test_after_an_update_that_failed_nothing_is_generated_until_one_succeeds(fault: str) -> None:
    engine = Engine()
    engine.received = [{"a": "1"}, {}]
    engine.load_weights(1)
    if fault == "read":
        engine.received = [{"a": "1"}, {"a": "2"}]
    elif fault == "held":
        engine.library.held = [{"a": "1"}, {"a": "2"}]
    else:
        engine.fails_to_send = OSError("gone")
    with pytest.raises((ServiceError, OSError)):
        engine.load_weights(2)
    assert ("serve", 2) not in engine.taken()
    assert engine.weight_version == 1
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, OPTIONS)
    assert caught.value.problem.code == "engine.weights.unfinished"
    engine.received, engine.library.held, engine.fails_to_send = [], [{}], None
    engine.load_weights(2)
    assert engine.generate([[1]], [[1]], OPTIONS)[0][0].weight_version == 2


def test_sleep_and_wake_reach_the_library_once_each() -> None:
    engine = Engine()
    engine.wake()
    engine.sleep()
    engine.sleep(2)
    assert (engine.taken(), engine.state) == ([("sleep", 1)], EngineState.ASLEEP)
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, OPTIONS)
    assert caught.value.problem.code == "engine.state"
    engine.wake()
    engine.wake()
    assert (engine.taken(), engine.state) == ([("wake", ["weights", "kv_cache"])], EngineState.READY)
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, OPTIONS)
    assert caught.value.problem.code == "engine.state", "level 2 gave the weights up"
    engine.refresh()
    assert engine.generate([[1]], [[1]], OPTIONS)
    for level in (0, 3):
        with pytest.raises(OptionsError):
            engine.sleep(level)
    engine.taken()
    engine.sleep(2)
    assert engine.taken() == [("sleep", 2)]


@pytest.mark.parametrize("ask", ["refresh", "load_weights"])
def test_an_update_during_sleep_wakes_the_weights_alone(ask: str) -> None:
    engine = Engine()
    engine.sleep(1)
    engine.taken()
    for number in (1, 2):
        engine.refresh() if ask == "refresh" else engine.load_weights(number)
        version = 0 if ask == "refresh" else number
        assert engine.taken() == ([("wake", ["weights"])] if number == 1 else []) + loaded(version)
        assert engine.state is EngineState.ASLEEP
    engine.wake()
    assert engine.taken() == [("wake", ["kv_cache"])]
    engine.sleep(1)
    engine.wake()
    assert engine.taken() == [("sleep", 1), ("wake", ["weights", "kv_cache"])]
