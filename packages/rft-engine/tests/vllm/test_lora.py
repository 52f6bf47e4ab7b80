"""Adapters alone on their way to the double of vLLM: nothing else is sent, every request asks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeLlm, FakeVllm, fake_tensors, write_fake_model
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import ServiceError
from rft_engine.vllm.engine import VllmEngine
from rft_engine.vllm.settings import VllmSettings, llm_arguments

CONFIG = json.dumps({"peft_type": "LORA", "r": 6, "lora_alpha": 8, "target_modules": ["q_proj"]})
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


class Adapters:
    """What the trainer has."""

    def __init__(self) -> None:
        self.value = torch.arange(12.0).view(6, 2)

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [(NAME, self.value)]


def started(tmp_path: Path, *faults: str) -> tuple[VllmEngine, FakeVllm, Adapters]:
    model = write_fake_model(tmp_path / "model")
    settings = VllmSettings(model_dir=model, max_rows=4, max_len=24, dtype="float32", adapter_config=CONFIG)
    adapters = Adapters()
    runtime: Any = FakeVllm(faults=faults)
    return VllmEngine(settings, adapters.tensors, runtime=runtime), runtime, adapters


def held(runtime: FakeVllm) -> FakeLlm:
    assert runtime.llm is not None
    return runtime.llm


def test_vllm_makes_room_for_one_adapter_of_the_next_rank(tmp_path: Path) -> None:
    model = write_fake_model(tmp_path / "model")
    given = VllmSettings(model_dir=model, max_rows=4, max_len=24, dtype="float32", adapter_config=CONFIG)
    arguments = llm_arguments(given, is_cpu=True)
    assert (arguments["enable_lora"], arguments["max_loras"], arguments["max_lora_rank"]) == (True, 1, 8)
    plain = llm_arguments(VllmSettings(model_dir=model, max_rows=4, max_len=24, dtype="float32"), is_cpu=True)
    assert "enable_lora" not in plain


def test_an_update_sends_the_adapters_and_touches_no_weight(tmp_path: Path) -> None:
    engine, runtime, adapters = started(tmp_path)
    llm = held(runtime)
    engine.generate([[1, 2]], [[5]], SamplingOptions(temperature=1.0, max_new_tokens=2))
    assert llm.llm_engine.adapters_asked == [None]
    for version in (1, 2):
        adapters.value = adapters.value + version
        engine.load_weights(version)
        [[completion]] = engine.generate([[1, 2]], [[5]], SamplingOptions(temperature=1.0, max_new_tokens=2))
        assert completion.weight_version == version
        assert torch.equal(llm.workers[0].adapters[NAME], adapters.value)
        folder = Path(llm.llm_engine.adapters_asked[-1].removeprefix("adapter in "))
        assert not folder.exists(), "the files are removed when every worker has read them"
    for name, tensor in fake_tensors(0).items():
        assert torch.equal(llm.workers[0].model.view(name), tensor)


def test_what_a_worker_read_is_compared_with_what_was_sent(tmp_path: Path) -> None:
    engine, runtime, _ = started(tmp_path, "other_adapter")
    with pytest.raises(ServiceError, match="worker 0") as caught:
        engine.load_weights(1)
    assert caught.value.problem.code == "engine.logprob_parity"
    assert NAME in caught.value.problem.what
    with pytest.raises(ServiceError):
        engine.generate([[1, 2]], [[5]], SamplingOptions(temperature=1.0, max_new_tokens=2))
    runtime.faults.clear()
    engine.load_weights(1)
    engine.generate([[1, 2]], [[5]], SamplingOptions(temperature=1.0, max_new_tokens=2))
