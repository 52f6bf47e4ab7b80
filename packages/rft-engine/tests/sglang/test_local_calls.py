"""One SGLang in this process, by a double that keeps what it is asked: requests, updates, memory, and the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import VOCAB, write_fake_model
from torch import Tensor

from rft_core.errors import ServiceError
from rft_engine.engine_base import EngineFacts
from rft_engine.process.requests import GenerateCall, SampleResult, StepCounts
from rft_engine.sglang.local import LocalSglang
from rft_engine.sglang.settings import LOADER, SglangSettings
from rft_engine.weight_sync.weight_file import read_weight_file, write_weight_file

OPTIONS: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": 4, "stop_token_ids": (0,)}
CALL = GenerateCall(0, OPTIONS, [10, 11, 12], [[1, 2], [3]], [(0, 0), (2, 1)], [4, 3, 2])
Outcome = tuple[bool, str]
DONE: Outcome = (True, "Success")


class Root:
    """`sglang.Engine` that keeps what it is asked; `ends` says when each request ends, by its seed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.log = settings, list[Any]()
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = SimpleNamespace(abort_request=self.abort)
        self.begun, self.updated, self.ended, self.flushed = DONE, DONE, DONE, True
        self.answers: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda request: [
            {"read": {"w": "file"}, "held": {"w": "held", "shapes": str(sorted(request["shapes"]))}}
        ]
        self.requests: list[dict[str, Any]] = []
        self.folders: list[Path] = []
        self.aborted = asyncio.Event()
        self.stuck: set[int] = set()

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        self.log.append(("abort", rid, abort_all))
        self.aborted.set()

    async def async_generate(self, **asked: Any) -> dict[str, Any]:
        self.log.append(("generate", asked))
        seed, prompt = asked["sampling_params"]["sampling_seed"], asked["input_ids"]
        if seed in self.stuck:
            await self.aborted.wait()
        top = [[(-0.1 * rank, rank, None) for rank in range(asked["top_logprobs_num"])]]
        meta = {"prompt_tokens": 100 * len(prompt), "cached_tokens": len(prompt), "finish_reason": {"type": "stop"}}
        meta |= {"output_token_logprobs": [(-2.0, seed, None)], "output_top_logprobs": top}
        return {"output_ids": [seed], "meta_info": meta}

    def begin_weight_update(self) -> Outcome:
        self.log.append("begin")
        return self.begun

    def end_weight_update(self) -> Outcome:
        self.log.append("end")
        return self.ended

    def update_weights_from_tensor(
        self, named_tensors: Sequence[tuple[str, Tensor]], load_format: str, flush_cache: bool
    ) -> Outcome:
        self.log.append(("update", load_format, flush_cache))
        [(path, tensor)] = named_tensors
        assert tensor.numel() == 0
        request = json.loads(Path(path).read_text())
        self.requests.append(request)
        self.folders.append(Path(path).parent)
        for number, answer in enumerate(self.answers(request)):
            Path(f"{request['answer']}.{number}").write_text(json.dumps(answer))
        return self.updated

    def flush_cache(self) -> Any:
        self.log.append("flush")
        return SimpleNamespace(success=self.flushed)

    def release_memory_occupation(self, tags: list[str]) -> None:
        self.log.append(("release", tags))

    def resume_memory_occupation(self, tags: list[str]) -> None:
        self.log.append(("resume", tags))

    def shutdown(self) -> None:
        self.log.append("shutdown")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake") / "model")


class Made:
    """An SGLang in this process and the double behind it."""

    def __init__(self, model_dir: Path, **changes: Any) -> None:
        settings = SglangSettings(**{"model_dir": model_dir, "max_rows": 2, "max_len": 32, **changes})
        made: list[Root] = []

        def make_engine(arguments: dict[str, Any]) -> Any:
            made.append(Root(arguments))
            return made[0]

        runtime: Any = SimpleNamespace(make_engine=make_engine)
        self.local = LocalSglang(settings, runtime)
        [self.root] = made

    def asked(self, call: GenerateCall = CALL) -> list[dict[str, Any]]:
        """What SGLang is asked for a call that is answered in full."""
        list(self.local.generate(call, 60.0))
        return [entry[1] for entry in self.root.log if entry[0] == "generate"]


@pytest.fixture
def made(model_dir: Path) -> Iterator[Made]:
    one = Made(model_dir)
    yield one
    one.root.loop.close()


@pytest.fixture
def weights(tmp_path: Path, model_dir: Path) -> str:
    path = tmp_path / "weights.safetensors"
    [file] = model_dir.glob("*.safetensors")
    write_weight_file(path, list(read_weight_file(file).items())[:2])
    return str(path)


def test_facts_are_those_of_the_model_and_the_settings(made: Made, model_dir: Path) -> None:
    assert made.local.facts == EngineFacts("float32", VOCAB, is_cpu=False, transport="file")
    other = Made(model_dir, dtype="bfloat16")
    assert other.local.facts.dtype == other.root.settings["dtype"] == "bfloat16"
    assert other.local.version == 0
    other.root.loop.close()


@pytest.mark.parametrize("error", [RuntimeError, ValueError, OSError, MemoryError, AssertionError])
def test_a_start_that_fails_has_a_code_and_sglang_s_words(model_dir: Path, error: type[Exception]) -> None:
    def fails(arguments: dict[str, Any]) -> Any:
        raise error("cannot")

    settings = SglangSettings(model_dir=model_dir, max_rows=2, max_len=32)
    runtime: Any = SimpleNamespace(make_engine=fails)
    with pytest.raises(ServiceError) as caught:
        LocalSglang(settings, runtime)
    assert caught.value.problem.code == "engine.sglang.start"
    assert "cannot" in caught.value.problem.what
    assert "native" in caught.value.problem.do


def test_every_sample_goes_with_its_prompt_key_and_budget_and_comes_back_by_its_number(made: Made) -> None:
    results = list(made.local.generate(CALL, 60.0))
    assert results[-1] == StepCounts(0, 297), "the tokens of both prompts that no cache held"
    assert sorted(results[:-1], key=lambda one: one.sample) == [  # type: ignore[union-attr]
        SampleResult(0, [10], [-2.0], [0.0], "stop", 0),
        SampleResult(2, [12], [-2.0], [0.0], "stop", 0),
    ]
    params = {"temperature": 0.7, "stop_token_ids": [0], "ignore_eos": False}
    shown = {"return_logprob": True, "top_logprobs_num": 0}
    assert [entry[1] for entry in made.root.log] == [
        {"input_ids": [1, 2], "sampling_params": params | {"max_new_tokens": 4, "sampling_seed": 10}, **shown},
        {"input_ids": [3], "sampling_params": params | {"max_new_tokens": 2, "sampling_seed": 12}, **shown},
    ]


@pytest.mark.parametrize(
    ("changes", "num_shown"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_k": 200}, VOCAB),
        ({"top_k": 0}, 0),
        ({"top_k": -1}, 0),
        ({"top_k": 3, "temperature": 0.0}, 0),
    ],
)
def test_as_many_log_probs_come_with_a_token_as_top_k_keeps(
    made: Made, changes: dict[str, Any], num_shown: int
) -> None:
    call = GenerateCall(0, OPTIONS | changes, [1], [[1]], [(0, 0)])
    [asked] = made.asked(call)
    assert asked["top_logprobs_num"] == num_shown


def test_a_call_for_other_weights_is_refused_before_anything_is_asked(made: Made) -> None:
    made.local.serve(3)
    made.root.log.clear()
    with pytest.raises(ServiceError) as caught:
        list(made.local.generate(CALL, 60.0))
    assert caught.value.problem.code == "engine.logprob_parity"
    assert made.root.log == []
    again = GenerateCall(3, OPTIONS, [10], [[1]], [(0, 0)])
    assert [one.version for one in made.local.generate(again, 60.0) if isinstance(one, SampleResult)] == [3]


def test_samples_that_are_done_come_before_a_deadline_ends_the_others(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.root.stuck = {12}
    results, waits = list[Any](), list[Any]()
    wait = made.root.loop.run_until_complete
    monkeypatch.setattr(made.root.loop, "run_until_complete", lambda future: (waits.append(future), wait(future))[1])
    with pytest.raises(ServiceError) as caught:
        results.extend(made.local.generate(CALL, 0.5))
    assert len(waits) == 3, "for the first end, to the deadline, and for what is dropped"
    assert caught.value.problem.code == "engine.deadline"
    assert "1 of 2" in caught.value.problem.what
    assert ("abort", "", True) in made.root.log
    assert not asyncio.all_tasks(made.root.loop), "nothing is left under way"


def test_a_call_that_is_left_early_is_aborted_and_one_that_ended_is_not(made: Made) -> None:
    list(made.local.generate(CALL, 60.0))
    assert ("abort", "", True) not in made.root.log
    made.root.stuck = {12}
    results = made.local.generate(CALL, 60.0)
    assert next(results) == SampleResult(0, [10], [-2.0], [0.0], "stop", 0)
    results.close()  # type: ignore[attr-defined]
    assert made.root.log[-1] == ("abort", "", True)
    assert not asyncio.all_tasks(made.root.loop)


def test_a_load_reads_and_then_looks_in_one_session(made: Made, weights: str) -> None:
    assert made.local.rpc("rft_load_file", [weights]) == [{"w": "file"}]
    assert made.root.log == ["begin", ("update", LOADER, True), ("update", LOADER, False), "end"]
    first, second = made.root.requests
    assert (first["weights"], first["shapes"], first["dtype"]) == (weights, {}, "float32")
    assert (second["weights"], second["dtype"]) == (None, "float32")
    assert second["shapes"] == {name: list(tensor.shape) for name, tensor in read_weight_file(weights).items()}
    [held] = made.local.rpc("rft_fingerprints", [{}])
    assert held == {"w": "held", "shapes": str(sorted(second["shapes"]))}
    assert not any(folder.exists() for folder in made.root.folders), "requests and answers are removed"


def test_no_other_method_is_known(made: Made) -> None:
    with pytest.raises(AssertionError):
        made.local.rpc("rft_other")


@pytest.mark.parametrize(
    ("fault", "log"),
    [
        ("begun", ["begin"]),
        ("updated", ["begin", ("update", LOADER, True), "end"]),
        ("ended", ["begin", ("update", LOADER, True), ("update", LOADER, False), "end"]),
    ],
)
def test_a_step_that_sglang_refuses_ends_the_load_and_the_session(
    made: Made, weights: str, fault: str, log: list[Any]
) -> None:
    made.local.rpc("rft_load_file", [weights])
    before = made.local.rpc("rft_fingerprints")
    made.root.log.clear()
    setattr(made.root, fault, (False, "busy"))
    made.root.answers = lambda request: [{"read": {"w": "new"}, "held": {"w": "new"}}]
    with pytest.raises(ServiceError) as caught:
        made.local.rpc("rft_load_file", [weights])
    assert caught.value.problem.code == "engine.sglang.update"
    assert caught.value.problem.what.endswith("busy")
    assert made.root.log == log
    assert made.local.rpc("rft_fingerprints") == before, "what a load that failed would have held is not handed out"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([], "0 of 2"),
        ([{"read": {}, "held": {}}], "1 of 2"),
        ([{"read": {}, "held": {}}] * 3, "3 of 2"),
        ([{"read": {}, "held": {}}, {"error": "too large"}], "too large"),
        ([{"error": "first"}], "first"),
    ],
)
def test_every_worker_must_have_loaded(
    model_dir: Path, weights: str, answers: list[dict[str, Any]], words: str
) -> None:
    made = Made(model_dir, tensor_parallel_size=2)
    made.root.answers = lambda request: answers
    with pytest.raises(ServiceError) as caught:
        made.local.rpc("rft_load_file", [weights])
    assert caught.value.problem.code == "engine.sglang.update"
    assert words in caught.value.problem.what
    assert made.root.log[-1] == "end"
    made.root.answers = lambda request: [{"read": {"w": n}, "held": {}} for n in "ab"]
    assert made.local.rpc("rft_load_file", [weights]) == [{"w": "a"}, {"w": "b"}]
    made.root.loop.close()


def test_a_version_is_served_once_the_old_prefixes_are_gone(made: Made) -> None:
    made.local.serve(4)
    assert (made.local.version, made.root.log) == (4, ["flush"])
    made.root.flushed = False
    with pytest.raises(ServiceError) as caught:
        made.local.serve(5)
    assert caught.value.problem.code == "engine.sglang.prefix_cache"
    assert made.local.version == 4


def test_memory_is_given_back_and_taken_again_weights_first(made: Made) -> None:
    made.local.sleep(1)
    made.local.wake(["kv_cache", "weights"])
    made.local.wake(["kv_cache"])
    assert made.root.log == [
        ("release", ["kv_cache", "weights"]),
        ("resume", ["weights", "kv_cache"]),
        ("resume", ["kv_cache"]),
    ]


def test_it_is_shut_down_once(made: Made) -> None:
    assert made.local.is_alive
    made.local.close()
    made.local.close()
    assert not made.local.is_alive
    assert made.root.log == ["shutdown"]
