"""What an engine answers is looked at before it is handed out: ninety kinds and places of garbage, none passes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import VOCAB, FakeVllm, fake_tensors, write_fake_model

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import ServiceError
from rft_engine.process.process_engine import ProcessBackend
from rft_engine.process.requests import GenerateCall, SampleResult, StepCounts
from rft_engine.slowness import slowest_reason
from rft_engine.vllm.engine import VllmEngine
from rft_engine.vllm.local import LocalVllm
from rft_engine.vllm.process import VllmProcessEngine
from rft_engine.vllm.settings import VllmSettings

PROMPTS, KEYS = [[1, 2], [3]], [list(range(4)), list(range(50, 55))]
ASKED = SamplingOptions(temperature=1.0, max_new_tokens=5)
NUM = 9
Spoil = Callable[[SampleResult], SampleResult]


def at(values: list[Any], place: int, value: Any) -> list[Any]:
    return [*values[:place], value, *values[place + 1 :]]


KINDS: dict[str, list[Spoil]] = {
    "length": [
        lambda r: replace(r, token_ids=r.token_ids * 2, logprobs=r.logprobs * 2, log_kept_mass=r.log_kept_mass * 2),
        lambda r: replace(r, logprobs=r.logprobs[:-1]),
        lambda r: replace(r, token_ids=[], logprobs=[], log_kept_mass=[]),
    ],
    "vocabulary": [
        lambda r: replace(r, token_ids=at(r.token_ids, 0, VOCAB)),
        lambda r: replace(r, token_ids=at(r.token_ids, 2, -1)),
        lambda r: replace(r, token_ids=at(r.token_ids, 4, 2.0)),
    ],
    "not a number": [
        lambda r: replace(r, logprobs=at(r.logprobs, 1, math.nan)),
        lambda r: replace(r, log_kept_mass=at(r.log_kept_mass, 3, -math.inf)),
        lambda r: replace(r, logprobs=at(r.logprobs, 4, "-1.0")),
    ],
    "version": [
        lambda r: replace(r, version=r.version + 1),
        lambda r: replace(r, version=r.version - 1),
        lambda r: replace(r, version=None),  # type: ignore[arg-type]
    ],
    "sample": [
        lambda r: replace(r, sample=r.sample + NUM),
        lambda r: replace(r, sample=-1),
        lambda r: replace(r, sample=(r.sample + 1) % NUM),  # the number of another one, which comes as well
    ],
}


class Spoilt(LocalVllm):
    """The double, with one of its results spoilt on the way."""

    spoil: Spoil | None = None
    place = 0
    dead = False

    @property
    def is_alive(self) -> bool:
        return not self.dead

    def close(self) -> None:
        self.dead = True

    def generate(self, call: GenerateCall, seconds: float) -> Iterator[SampleResult | StepCounts]:
        for result in super().generate(call, seconds):
            if self.spoil is not None and isinstance(result, SampleResult) and result.sample == self.place:
                yield self.spoil(result)
            else:
                yield result


class HereEngine(VllmEngine):
    def _start(self) -> Spoilt:
        return Spoilt(self._settings, FakeVllm(), in_process=True)


class ProcessEngine(VllmProcessEngine):
    def _start(self) -> Spoilt:
        return Spoilt(self._settings, FakeVllm(), in_process=False)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> VllmSettings:
    model_dir = write_fake_model(tmp_path_factory.mktemp("fake") / "model")
    return VllmSettings(model_dir=model_dir, max_rows=4, max_len=32, transport="file")


def tensors() -> list[tuple[str, Any]]:
    return list(fake_tensors(0).items())


def tokens(answers: Any) -> list[Any]:
    return [[completion.token_ids for completion in row] for row in answers]


@pytest.mark.parametrize("place", [0, 4, 8])
@pytest.mark.parametrize("variant", range(3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine_of", [HereEngine, ProcessEngine])
def test_garbage_is_refused_before_it_is_handed_out(
    settings: VllmSettings, tmp_path: Path, engine_of: Any, kind: str, variant: int, place: int
) -> None:
    engine = engine_of(settings, tensors, **({"log_path": tmp_path / "log"} if engine_of is ProcessEngine else {}))
    engine.load_weights(1)
    wanted = tokens(engine.generate(PROMPTS, KEYS, ASKED))
    spoilt = engine._backend
    spoilt.spoil, spoilt.place = KINDS[kind][variant], place
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, ASKED)
    assert caught.value.problem.code == "engine.garbage"
    assert str(place) in caught.value.problem.what or kind == "sample"
    assert engine.stats().num_generated_tokens == 0
    assert engine_of is HereEngine or spoilt.dead, "nothing is known of a process that answers garbage"
    spoilt.spoil = None
    assert tokens(engine.generate(PROMPTS, KEYS, ASKED)) == wanted


@pytest.mark.parametrize("missing", [0, 8])
def test_a_sample_that_never_comes_is_missed(settings: VllmSettings, missing: int, monkeypatch: Any) -> None:
    engine = HereEngine(settings, tensors)
    honest = Spoilt.generate

    def silent(self: Any, call: Any, seconds: float) -> Any:
        return (r for r in honest(self, call, seconds) if not (isinstance(r, SampleResult) and r.sample == missing))

    monkeypatch.setattr(Spoilt, "generate", silent)
    with pytest.raises(ServiceError, match=f"sample {missing} of 9 is missing") as caught:
        engine.generate(PROMPTS, KEYS, ASKED)
    assert caught.value.problem.code == "engine.garbage"


def test_a_sequence_outside_of_the_constraint_is_refused(settings: VllmSettings) -> None:
    engine = HereEngine(settings, tensors)
    engine._backend.spoil = lambda r: replace(r, token_ids=[3, 2])  # type: ignore[attr-defined]
    with pytest.raises(ServiceError, match=r"\[3, 2\], is not a sequence of the constraint") as caught:
        engine.generate(
            PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=2), constraint=TokenTrie.of([[1, 2], [2, 3]])
        )
    assert caught.value.problem.code == "engine.constraint.not_whole"


def test_a_budget_that_was_passed_or_not_used_up_is_refused(settings: VllmSettings) -> None:
    for spoil in (
        lambda r: replace(r, token_ids=r.token_ids[:1], logprobs=r.logprobs[:1], log_kept_mass=r.log_kept_mass[:1]),
        lambda r: replace(r, token_ids=[1] * 4, logprobs=[-1.0] * 4, log_kept_mass=[0.0] * 4),
    ):
        engine = HereEngine(settings, tensors)
        engine._backend.spoil = spoil  # type: ignore[attr-defined]
        with pytest.raises(ServiceError) as caught:
            engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=5), budgets=[[3]])
        assert caught.value.problem.code == "engine.garbage"


ANSWERS = [
    "no json at all",
    json.dumps({"item": {"sample": 0}}),
    json.dumps({"item": [1, 2]}),
    json.dumps({"reply": None}),
    json.dumps({"reply": {"num_steps": 1, "num_prefill_tokens": 1, "num_preemptions": None, "more": 1}}),
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_lines_that_are_no_messages_are_garbage_too(settings: VllmSettings, tmp_path: Path, answer: str) -> None:
    facts = {"dtype": "float32", "vocab_size": VOCAB, "is_cpu": True, "transport": "file"}
    code = (
        "import os, sys\n"
        "requests, answers = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), 'w')\n"
        f"for line, answer in zip(requests, {[json.dumps({'reply': facts}), answer]!r}):\n"
        "    print(answer, file=answers, flush=True)\n"
        "requests.readline()\n"
    )
    process = ProcessBackend(settings, [sys.executable, "-S", "-c", code], {}, tmp_path / "log")
    call = GenerateCall(0, {"max_new_tokens": 5, "stop_token_ids": []}, [1], [[1]], [(0, 0)])
    try:
        with pytest.raises(ServiceError) as caught:
            list(process.generate(call, 20.0))
        assert caught.value.problem.code == "engine.garbage"
    finally:
        process.close()


def test_preemptions_are_told_where_vllm_tells_them(settings: VllmSettings, monkeypatch: Any) -> None:
    import fake_vllm

    honest = fake_vllm.FakeEngine._output

    def with_metrics(self: Any, row: Any) -> Any:
        output = honest(self, row)
        output.metrics = type("Metrics", (), {"num_preemptions": 2})()
        return output

    engine = HereEngine(settings, tensors)
    engine.generate(PROMPTS, KEYS, ASKED)
    assert engine.stats().num_preemptions is None
    monkeypatch.setattr(fake_vllm.FakeEngine, "_output", with_metrics)
    engine.generate(PROMPTS, KEYS, ASKED)
    assert engine.stats().num_preemptions == 2 * NUM
    assert slowest_reason(engine.stats()).cause == "preemptions"
