"""vLLM on a GPU: sleep, CUDA handles, 8-bit weights. `pytest -m gpu tests/vllm` on a machine with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from policy_side import MAX_LEN, Policy

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.vllm.engine import VllmEngine
from rft_engine.vllm.process import VllmProcessEngine
from rft_engine.vllm.settings import VllmSettings
from rft_engine.weight_sync.logprob_probe import check_logprob_parity

pytestmark = pytest.mark.gpu

PROMPTS, KEYS = [[2, 3, 4], [5, 6]], [[11, 12], [21, 22]]
ASKED = SamplingOptions(temperature=1.0, max_new_tokens=16)


class CudaPolicy(Policy):
    """The policy's tensors on the GPU in bfloat16; its log-probs from the same values."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to("cuda", torch.bfloat16)


def settings(model_dir: Path, **fields: object) -> VllmSettings:
    sizes = {"max_rows": 8, "max_len": MAX_LEN, "dtype": "bfloat16", "memory_utilization": 0.2, "enforce_eager": True}
    return VllmSettings(**{"model_dir": model_dir, **sizes, **fields})


def tokens(answers):
    return [[completion.token_ids for completion in row] for row in answers]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_the_engine_serves_the_same_afterwards(model_dir: Path, level: int) -> None:
    policy = CudaPolicy(model_dir)
    engine = VllmProcessEngine(settings(model_dir, enable_sleep=True), policy.tensors)
    try:
        engine.load_weights(1)
        wanted = tokens(engine.generate(PROMPTS, KEYS, ASKED))
        used = torch.cuda.mem_get_info()[0]
        engine.sleep(level)
        assert torch.cuda.mem_get_info()[0] > used + 2**30
        engine.wake()
        if level == 2:
            engine.refresh()
        assert tokens(engine.generate(PROMPTS, KEYS, ASKED)) == wanted
    finally:
        engine.close()


@pytest.mark.parametrize("transport", ["ipc", "file"])
def test_an_update_between_processes_agrees_with_the_policy(model_dir: Path, transport: str) -> None:
    policy = CudaPolicy(model_dir)
    engine = VllmProcessEngine(settings(model_dir, transport=transport), policy.tensors)
    try:
        for version in (1, 2):
            policy.change(version)
            engine.load_weights(version)
            assert check_logprob_parity(engine, policy.logprobs).maximum < 0.25
    finally:
        engine.close()


def test_eight_bit_weights_are_rounded_anew_at_every_update(model_dir: Path) -> None:
    policy = CudaPolicy(model_dir)
    engine = VllmEngine(settings(model_dir, quantization="fp8"), policy.tensors)
    try:
        before = tokens(engine.generate(PROMPTS, KEYS, ASKED))
        policy.change(1)
        engine.load_weights(1)
        assert check_logprob_parity(engine, policy.logprobs, limit=1.0).mean < 0.3
        assert tokens(engine.generate(PROMPTS, KEYS, ASKED)) != before
    finally:
        engine.close()


@pytest.mark.multigpu
def test_weights_are_broadcast_to_another_gpu(model_dir: Path) -> None:
    policy = CudaPolicy(model_dir)
    elsewhere = {"CUDA_VISIBLE_DEVICES": "1"}
    engine = VllmProcessEngine(settings(model_dir, transport="nccl"), policy.tensors, environment=elsewhere)
    try:
        policy.change(1)
        engine.load_weights(1)
        assert check_logprob_parity(engine, policy.logprobs).maximum < 0.25
    finally:
        engine.close()
