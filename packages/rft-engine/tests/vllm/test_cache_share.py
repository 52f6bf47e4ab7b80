"""The share that vLLM is given where nobody gives one: no start fails of it, and its cache holds all rows."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_core.errors import ServiceError
from rft_engine.build_request import EngineBuildRequest
from rft_engine.process.gpu_processes import Device
from rft_engine.settings import DecodingEngineSettings
from rft_engine.vllm import process
from rft_engine.vllm.cache_share import needed_mib, num_blocks, started_for_rows, with_share_for_rows
from rft_engine.vllm.settings import VllmSettings, token_bytes

MIB, GIB = 2**20, 2**30
CONFIG = {
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "vocab_size": 151_936,
    "dtype": "bfloat16",
}
"""A model of 1.5 billion weights."""
TOTAL = 81_559


def settings(folder: Path, weights: int = 3 * GIB, config: dict[str, Any] | None = None, **more: Any) -> VllmSettings:
    """Settings of an engine whose directory holds so many bytes of weights; they are holes in a file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(weights)
    return VllmSettings(model_dir=folder, **{"max_rows": 256, "max_len": 2048, **more})


def test_a_token_takes_its_keys_and_values_in_all_layers(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    assert token_bytes(chosen) == 2 * 28 * 2 * 128 * 2
    assert token_bytes(chosen, 2) == 2 * 28 * 1 * 128 * 2
    assert token_bytes(chosen, 4) == token_bytes(chosen, 2), "a head is not divided"
    assert token_bytes(replace(chosen, dtype="float32")) == 2 * token_bytes(chosen)


def test_what_is_needed_is_weights_blocks_and_workspace(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    assert num_blocks(chosen) == 256 * 128
    assert num_blocks(replace(chosen, max_len=2049)) == 256 * 129
    cache = 256 * 2048 * token_bytes(chosen)
    needed, with_more_rows = needed_mib(chosen), needed_mib(replace(chosen, max_rows=512))
    assert needed is not None
    assert with_more_rows is not None
    assert 3 * 1024 + cache // MIB < needed < 3 * 1024 + cache // MIB + 7 * 1024
    logits = 3 * 4 * 256 * 151_936
    assert with_more_rows - needed == pytest.approx((cache + logits) / MIB, abs=2)


def test_weights_are_counted_as_they_are_loaded_and_shared(tmp_path: Path) -> None:
    chosen = settings(tmp_path, weights=8 * GIB)
    needed = needed_mib(chosen)
    wide = needed_mib(settings(tmp_path / "wide", weights=16 * GIB, config={"dtype": "float32"}, dtype="bfloat16"))
    shared = needed_mib(replace(chosen, tensor_parallel_size=2))
    assert needed is not None
    assert needed == wide
    assert shared is not None
    assert needed - shared == pytest.approx(4 * 1024 + 256 * 2048 * token_bytes(chosen, 2) / MIB, abs=2)


def test_a_share_that_is_given_holds_and_what_is_not_known_is_left_to_vllm(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    for left in (
        replace(chosen, memory_utilization=0.5),
        replace(chosen, max_rows=4096),  # more than vLLM's own share
        replace(chosen, model_dir=tmp_path / "nowhere"),
    ):
        assert with_share_for_rows(left, TOTAL) is left
    assert with_share_for_rows(chosen, 0) is chosen
    for config in ({"vocab_size": None}, {"dtype": "int4"}, {"vision_config": {}}):
        assert needed_mib(settings(tmp_path, config=config)) is None
    assert needed_mib(settings(tmp_path, weights=0)) is None


@dataclass
class Accounted:
    """A stand-in for vLLM that takes its share, and has of its blocks what weights and workspace leave."""

    weights_mib: int
    workspace_mib: int
    free_mib: int
    shares: list[float] = field(default_factory=list[float])

    def make(self, chosen: VllmSettings) -> int:
        """The blocks of an engine; a share that does not fit or holds not one sequence is an error, as vLLM's are."""
        share = chosen.memory_utilization or 0.92
        self.shares.append(share)
        if share * TOTAL > self.free_mib:
            raise failure("others", "--engine_mem_util 0.01")
        left = share * TOTAL - self.weights_mib - self.workspace_mib
        blocks = int(left * MIB / (16 * token_bytes(chosen)))
        if blocks < math.ceil(chosen.max_len / 16):
            raise failure("share_too_low" if left <= 0 else "length", "--engine_mem_util 0.9")
        return blocks


def failure(code: str, do: str) -> ServiceError:
    return ServiceError(code=f"engine.vllm.memory.{code}", what="vLLM did not start", where="w", why="y", do=do)


@pytest.mark.parametrize("workspace", [500, 2000, 3500])
def test_sixty_settings_start_with_room_for_all_rows_or_all_that_is_free(tmp_path: Path, workspace: int) -> None:
    for max_rows, max_len in ((8, 32_768), (64, 4096), (256, 2048), (512, 1024), (1024, 4096)):
        for free in (30_000, 50_000, 70_000, 81_000):
            chosen = settings(tmp_path, max_rows=max_rows, max_len=max_len)
            vllm = Accounted(weights_mib=3 * 1024, workspace_mib=workspace, free_mib=free)
            blocks = started_for_rows(vllm.make, chosen, Device(0, "u", TOTAL, free))
            assert len(vllm.shares) == 1
            # of what is free 512 MiB stay, the share is rounded down to hundredths, and vLLM's own is the most
            most = min(free - 512 - TOTAL / 100, 0.92 * TOTAL) - vllm.weights_mib - workspace
            assert blocks >= min(num_blocks(chosen), int(most * MIB / (16 * token_bytes(chosen))))


def test_a_share_that_turns_out_too_small_is_left_to_vllm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    chosen = settings(tmp_path, max_rows=4, max_len=512)
    vllm = Accounted(weights_mib=3 * 1024, workspace_mib=12_000, free_mib=81_000)
    assert started_for_rows(vllm.make, chosen, Device(0, "u", TOTAL, 81_000)) > num_blocks(chosen)
    first, second = vllm.shares
    assert first < 0.2
    assert second == 0.92
    assert caplog.messages == ["vLLM did not start; it is started once more with vLLM's own share"]


def test_another_error_of_a_start_is_raised_as_it_is(tmp_path: Path) -> None:
    tried: list[float | None] = []

    def make(chosen: VllmSettings) -> None:
        tried.append(chosen.memory_utilization)
        raise failure("model_too_large", "--engine_tp_size 2")

    with pytest.raises(ServiceError, match="did not start"):
        started_for_rows(make, settings(tmp_path), Device(0, "u", TOTAL, 81_000))
    assert len(tried) == 1


def test_an_engine_is_built_with_the_share_for_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[VllmSettings] = []
    monkeypatch.setattr(process, "VllmProcessEngine", lambda chosen, *_, **__: made.append(chosen))
    chosen = settings(tmp_path)
    request = EngineBuildRequest(
        settings=DecodingEngineSettings(engine_max_rows=chosen.max_rows),
        model_dir=tmp_path,
        max_len=chosen.max_len,
        device=torch.device("cuda", 0),
        dtype="bfloat16",
        weights=list,
        environment={"CUDA_VISIBLE_DEVICES": "0"},
    )
    process.build(request, lambda: [Device(0, "GPU-u", TOTAL, 81_000)])
    process.build(replace(request, device="cpu"), lambda: [Device(0, "GPU-u", TOTAL, 81_000)])
    on_gpu, on_cpu = made
    assert on_gpu.memory_utilization == with_share_for_rows(chosen, TOTAL).memory_utilization
    assert on_gpu.memory_utilization is not None
    assert 0.2 < on_gpu.memory_utilization < 0.4
    assert on_cpu.memory_utilization is None
