"""One vLLM in this process, by a double that finishes what a list says: requests, results, and how a call ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import write_fake_model

from rft_core.errors import OptionsError, ServiceError
from rft_engine.engine_base import EngineFacts
from rft_engine.process.requests import GenerateCall, SampleResult, StepCounts
from rft_engine.vllm import local as module
from rft_engine.vllm.keyed_sampler import SAMPLE_ARGUMENT
from rft_engine.vllm.local import LocalVllm
from rft_engine.vllm.settings import VllmSettings

OPTIONS = {"max_new_tokens": 4, "stop_token_ids": (0, 5)}
CALL = GenerateCall(0, OPTIONS, [10, 11, 12], [[1, 2], [3]], [(0, 0), (2, 1)], [4, 3, 2])


def output(name: str, tokens: Sequence[int], **fields: Any) -> Any:
    given = {"prompt_token_ids": [1, 2], "num_cached_tokens": 0, "finished": True, "reason": "length"} | fields
    one = SimpleNamespace(token_ids=tuple(tokens), finish_reason=given.pop("reason"))
    return SimpleNamespace(request_id=name, outputs=[one], **given)


class Llm:
    """vLLM that keeps what it is asked; each step finishes what `steps` says next."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.steps: list[list[Any]] = []
        self.drawn: dict[int, list[int]] = {}
        self.drops_prefixes = True
        self.llm_engine = self
        self.model_config = SimpleNamespace(dtype=torch.float16, get_vocab_size=lambda: 11)

    def add_request(self, name: str, prompt: Any, params: Any, **options: Any) -> None:
        self.log.append(("add", name, prompt, params, options))

    def step(self) -> list[Any]:
        return self.steps.pop(0)

    def abort_request(self, names: list[str]) -> None:
        self.log.append(("abort", names))

    def reset_encoder_cache(self) -> None:
        self.log.append(("reset encoder",))

    def reset_prefix_cache(self) -> bool:
        self.log.append(("reset prefixes",))
        return self.drops_prefixes

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        self.log.append((method, timeout, args))
        if method != "rft_pop_samples":
            return [method]
        lists = [self.drawn[sample][:length] for sample, length in zip(*args, strict=True)]
        return [
            [{"token_ids": one, "logprobs": [-1.0] * len(one), "log_kept_mass": [-0.5] * len(one)} for one in lists]
        ]

    def sleep(self, level: int) -> None:
        self.log.append(("sleep", level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.log.append(("wake", tags))

    def taken(self) -> list[Any]:
        found, self.log = self.log, []
        return found


class Runtime:
    def __init__(self, *, is_cpu: bool) -> None:
        self.is_cpu, self.llm = is_cpu, Llm()
        self.arguments: dict[str, Any] = {}
        self.closed: list[Any] = []
        self.error: Exception | None = None

    def make_llm(self, arguments: dict[str, Any]) -> Llm:
        self.arguments = arguments
        if self.error is not None:
            raise self.error
        return self.llm

    def make_sampling_params(self, **fields: Any) -> Any:
        return fields

    def make_adapter_request(self, folder: str) -> Any:
        return f"adapter in {folder}"

    def shut_down(self, llm: Any) -> None:
        self.closed.append(llm)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake") / "model")


@pytest.fixture
def started(model_dir: Path) -> tuple[LocalVllm, Llm]:
    return start(model_dir)[:2]


def start(model_dir: Path, *, is_cpu: bool = True, in_process: bool = True, **given: Any) -> tuple[LocalVllm, Llm, Any]:
    runtime: Any = Runtime(is_cpu=is_cpu)
    settings = VllmSettings(model_dir=model_dir, max_rows=4, max_len=32, **given)
    return LocalVllm(settings, runtime, in_process=in_process), runtime.llm, runtime


def test_the_library_is_asked_for_each_sample_and_results_come_as_they_end(started: tuple[LocalVllm, Llm]) -> None:
    local, llm = started
    llm.drawn = {0: [1, 2, 5, 9], 2: [7, 8]}
    llm.steps = [
        [],
        [output("0-2", [7, 8], prompt_token_ids=[3]), output("0-0", [], finished=False)],
        [output("0-0", [1, 2, 5], num_cached_tokens=None, reason="stop")],
    ]
    found = list(local.generate(CALL, 60.0))
    assert found == [
        SampleResult(2, [7, 8], [-1.0] * 2, [-0.5] * 2, "length", 0),
        SampleResult(0, [1, 2, 5], [-1.0] * 3, [-0.5] * 3, "stop", 0),
        StepCounts(3, 3, None),
    ]
    params = {"temperature": 1.0, "stop_token_ids": [0, 5], "ignore_eos": True, "detokenize": False}
    assert llm.taken() == [
        ("rft_begin", None, (OPTIONS, [10, 11, 12], None)),
        (
            "add",
            "0-0",
            {"prompt_token_ids": [1, 2]},
            params | {"max_tokens": 4, "extra_args": {SAMPLE_ARGUMENT: 0}},
            {},
        ),
        ("add", "0-2", {"prompt_token_ids": [3]}, params | {"max_tokens": 2, "extra_args": {SAMPLE_ARGUMENT: 2}}, {}),
        ("rft_pop_samples", None, ([2], [2])),
        ("rft_pop_samples", None, ([0], [3])),
    ]
    llm.steps = [[output("1-0", [1, 2, 5], num_cached_tokens=1), output("1-2", [7, 8], num_cached_tokens=2)]]
    assert list(local.generate(CALL, 60.0))[-1] == StepCounts(1, 1, None)
    assert [entry[1] for entry in llm.taken() if entry[0] == "add"] == ["1-0", "1-2"], "no name comes twice"


@pytest.mark.parametrize(("metrics", "told"), [((2, 3), 5), ((0, 0), 0), ((None, 4), 4), ((None, None), None)], ids=str)
def test_preemptions_are_those_of_the_requests_that_tell(
    started: tuple[LocalVllm, Llm], metrics: tuple[int | None, int | None], told: int | None
) -> None:
    local, llm = started
    llm.drawn = {0: [1], 2: [7]}
    kinds = [None if one is None else SimpleNamespace(num_preemptions=one) for one in metrics]
    llm.steps = [[output("0-0", [1], metrics=kinds[0])], [output("0-2", [7], metrics=kinds[1])]]
    assert list(local.generate(CALL, 60.0))[-1] == StepCounts(2, 4, told)


def test_a_sequence_of_a_constraint_ends_whole(started: tuple[LocalVllm, Llm]) -> None:
    local, llm = started
    llm.drawn = {0: [1, 2, 3, 4], 2: [7, 8]}
    llm.steps = [[output("0-0", [1, 2, 3, 4]), output("0-2", [7, 8], reason="abort")]]
    call = GenerateCall(0, OPTIONS, [10, 11, 12], [[1, 2], [3]], [(0, 0), (2, 1)], [4, 3, 2], {"tokens": []})
    first, second, _ = local.generate(call, 60.0)
    assert isinstance(first, SampleResult)
    assert isinstance(second, SampleResult)
    assert (first.finish_reason, second.finish_reason) == ("stop", "abort")
    assert llm.log[0] == ("rft_begin", None, (OPTIONS, [10, 11, 12], {"tokens": []}))


@pytest.mark.parametrize(("drawn", "place"), [([1, 9, 5], 1), ([4, 2, 5], 0), ([1, 2, 6], 2)])
def test_a_token_that_was_not_drawn_is_refused_by_its_place(
    started: tuple[LocalVllm, Llm], drawn: list[int], place: int
) -> None:
    local, llm = started
    llm.drawn = {0: drawn}
    llm.steps = [[output("0-0", [1, 2, 5])]]
    with pytest.raises(ServiceError, match=f"at index {place}") as caught:
        list(local.generate(CALL, 60.0))
    assert caught.value.problem.code == "engine.vllm.not_drawn"
    assert llm.log[-1] == ("abort", ["0-2"])


def test_a_call_for_other_weights_asks_for_nothing(started: tuple[LocalVllm, Llm]) -> None:
    local, llm = started
    local.serve(3)
    llm.taken()
    with pytest.raises(ServiceError) as caught:
        list(local.generate(CALL, 60.0))
    assert caught.value.problem.code == "engine.logprob_parity"
    assert llm.log == []


def test_a_call_past_its_deadline_or_left_early_drops_its_requests(
    started: tuple[LocalVllm, Llm], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, llm = started
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    llm.drawn = {0: [1, 2, 5]}
    llm.steps = [[output("0-0", [1, 2, 5])], []]
    call = local.generate(CALL, 5.0)
    assert isinstance(next(call), SampleResult)
    now[0] = 105.0
    llm.steps = [[], []]
    real = llm.step

    def late() -> list[Any]:
        found = real()
        now[0] += 0.1
        return found

    llm.step = late  # type: ignore[method-assign]
    with pytest.raises(ServiceError, match="1 of 2") as caught:
        next(call)
    assert caught.value.problem.code == "engine.deadline"
    assert len(llm.steps) == 1, "at the deadline itself a step is still made"
    assert llm.taken()[-1] == ("abort", ["0-2"])
    llm.step = real  # type: ignore[method-assign]
    llm.steps = [[output("1-0", [1, 2, 5])]]
    left: Any = local.generate(CALL, 5.0)
    next(left)
    left.close()
    assert llm.log[-1] == ("abort", ["1-2"])


def test_what_was_read_of_a_prompt_with_images_is_compared(model_dir: Path) -> None:
    local, llm, _ = start(model_dir)
    llm.drawn = {0: [1], 2: [7]}
    media = [None, {"token_ids": [9], "files": [], "options": {"a": 1}}]
    call = GenerateCall(0, OPTIONS, [10, 11, 12], [[1, 2], [3, 3]], [(0, 0), (2, 1)], [1, 1, 1], None, media)
    llm.steps = [[output("0-0", [1]), output("0-2", [7], prompt_token_ids=[3, 3])]]
    assert len(list(local.generate(call, 60.0))) == 3
    adds = [entry for entry in llm.taken() if entry[0] == "add"]
    assert adds[1][2] == {
        "prompt_token_ids": [9],
        "multi_modal_data": {"image": []},
        "mm_processor_kwargs": {"a": 1},
    }
    llm.steps = [[output("1-0", [1]), output("1-2", [7], prompt_token_ids=[3, 3, 3])]]
    with pytest.raises(ServiceError) as caught:
        list(local.generate(call, 60.0))
    assert caught.value.problem.code == "engine.vllm.placeholders"


def test_requests_ask_for_the_adapter_once_one_is_loaded(started: tuple[LocalVllm, Llm]) -> None:
    local, llm = started
    assert local.rpc("rft_load_file", ["path"], 9.0) == ["rft_load_file"]
    assert local.rpc("rft_load_adapter", ["folder"]) == ["rft_load_adapter"]
    assert llm.taken() == [("rft_load_file", 9.0, ("path",)), ("rft_load_adapter", None, ("folder",))]
    llm.steps = [[]]
    call = local.generate(CALL, 60.0)
    with pytest.raises(IndexError):
        next(call)
    assert [entry[4] for entry in llm.log if entry[0] == "add"] == [{"lora_request": "adapter in folder"}] * 2


@pytest.mark.parametrize("has_tower", [False, True])
def test_serving_drops_what_older_weights_have_computed(tmp_path: Path, has_tower: bool) -> None:
    config = {"vision_config": {}} if has_tower else {}
    local, llm, _ = start(write_fake_model(tmp_path / "model", **config))
    local.serve(3)
    assert llm.taken() == [("reset prefixes",)] + ([("reset encoder",)] if has_tower else [])
    assert local.version == 3
    llm.drops_prefixes = False
    with pytest.raises(ServiceError) as caught:
        local.serve(4)
    assert (caught.value.problem.code, local.version) == ("engine.vllm.prefix_cache", 3)


def test_sleep_is_for_a_gpu_and_close_shuts_the_library_down(model_dir: Path) -> None:
    local, llm, runtime = start(model_dir, is_cpu=False)
    local.sleep(2)
    local.wake(["weights"])
    assert llm.taken() == [("sleep", 2), ("wake", ["weights"])]
    local.close()
    assert runtime.closed == [llm]
    assert local.is_alive
    on_cpu, llm, _ = start(model_dir)
    with pytest.raises(OptionsError):
        on_cpu.sleep(1)
    assert llm.log == []


@pytest.mark.parametrize(
    ("is_cpu", "in_process", "transport", "backend"),
    [(True, True, "direct", None), (True, False, "file", None), (False, False, "ipc", "ipc")],
)
def test_facts_are_those_of_the_library_and_the_transport_of_its_place(
    model_dir: Path, is_cpu: bool, in_process: bool, transport: str, backend: str | None
) -> None:
    local, _, runtime = start(model_dir, is_cpu=is_cpu, in_process=in_process)
    assert local.facts == EngineFacts("float16", 11, is_cpu, transport)
    assert runtime.arguments.get("weight_transfer_backend") == backend
    assert local.version == 0


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), ValueError("x"), OSError("y"), MemoryError("z")])
def test_a_start_that_fails_is_a_typed_error(model_dir: Path, error: Exception) -> None:
    runtime: Any = Runtime(is_cpu=True)
    runtime.error = error
    settings = VllmSettings(model_dir=model_dir, max_rows=4, max_len=32)
    with pytest.raises(ServiceError) as caught:
        LocalVllm(settings, runtime, in_process=True, inventory=lambda: [])
    assert caught.value.problem.code == "engine.vllm.start"
    assert caught.value.__cause__ is error
