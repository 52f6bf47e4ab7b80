"""SGLang on a GPU, all of it: `pytest -m gpu tests/sglang` on a machine with one. Not yet run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_side import MAX_LEN, Policy

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError
from rft_engine.sglang.engine import SglangEngine
from rft_engine.sglang.pinned_api import signature, surface
from rft_engine.sglang.settings import SglangSettings
from rft_engine.weight_sync.logprob_probe import check_logprob_parity

pytestmark = pytest.mark.gpu

PROMPTS, KEYS = [[2, 3, 4], [5, 6]], [[11, 12], [21, 22]]
ASKED = SamplingOptions(temperature=1.0, max_new_tokens=16)


class CudaPolicy(Policy):
    """The policy's tensors on the GPU in bfloat16; its log-probs from the same values."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to("cuda", torch.bfloat16)


def start(model_dir: Path, policy: CudaPolicy, **fields: Any) -> SglangEngine:
    sizes = {"max_rows": 8, "max_len": MAX_LEN, "dtype": "bfloat16", "memory_utilization": 0.2, "enforce_eager": True}
    return SglangEngine(SglangSettings(**{"model_dir": model_dir, **sizes, **fields}), policy.tensors)


def tokens(answers):
    return [[completion.token_ids for completion in row] for row in answers]


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> CudaPolicy:
    return CudaPolicy(model_dir)


@pytest.fixture(scope="module")
def engine(model_dir: Path, policy: CudaPolicy) -> Iterator[SglangEngine]:
    started = start(model_dir, policy)
    yield started
    started.close()


def test_the_installed_release_has_the_signatures_of_the_snapshot() -> None:
    import sglang
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    for name in surface()["calls"]:
        kind, _, method = name.partition(".")
        found = inspect.signature(
            getattr({"Engine": sglang.Engine, "TokenizerManager": TokenizerManager}[kind], method)
        )
        assert list(found.parameters) == list(signature(name).parameters), name


def test_an_update_agrees_with_the_policy_and_changes_the_text(engine: SglangEngine, policy: CudaPolicy) -> None:
    seen: list[object] = []
    for version in (1, 2):
        policy.change(version)
        engine.load_weights(version)
        assert check_logprob_parity(engine, policy.logprobs).maximum < 0.25
        seen.append(tokens(engine.generate(PROMPTS, KEYS, ASKED)))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_temperature(engine: SglangEngine, policy: CudaPolicy, temperature: float) -> None:
    engine.refresh()
    answers = engine.generate(PROMPTS, KEYS, replace(ASKED, temperature=temperature))
    for prompt, row in zip(PROMPTS, answers, strict=True):
        expected = policy.logprobs([prompt] * len(row), [c.token_ids for c in row], temperature)
        for completion, logprobs in zip(row, expected, strict=True):
            assert completion.logprobs == pytest.approx(logprobs, abs=0.25)


def test_a_key_gives_its_tokens_in_any_company(engine: SglangEngine) -> None:
    together = engine.generate(PROMPTS, KEYS, ASKED)
    alone = [[engine.generate([p], [[k]], ASKED)[0][0] for k in ks] for p, ks in zip(PROMPTS, KEYS, strict=True)]
    assert tokens(alone) == tokens(together)


def test_top_k_and_top_p_leave_the_mass_that_is_told(engine: SglangEngine, policy: CudaPolicy) -> None:
    [row] = engine.generate(
        [[2, 3]], [list(range(32))], SamplingOptions(temperature=1.0, max_new_tokens=1, top_k=8, top_p=0.8)
    )
    table = policy.logits([2, 3], [0])[0].log_softmax(-1).double()
    order = table.argsort(descending=True)[:8].tolist()
    kept = [v for i, v in enumerate(order) if float(table[order[:i]].exp().sum()) <= 0.8]
    for completion in row:
        assert completion.log_kept_mass[0] == pytest.approx(math.log(float(table[kept].exp().sum())), abs=0.1)


def test_what_is_refused_is_refused(engine: SglangEngine) -> None:
    with pytest.raises(OptionsError):
        engine.generate(PROMPTS, KEYS, replace(ASKED, top_p=0.9))


def test_a_death_is_mended_with_the_same_tokens(engine: SglangEngine) -> None:
    wanted = tokens(engine.generate(PROMPTS, KEYS, ASKED))
    engine._backend.close()
    assert tokens(engine.generate(PROMPTS, KEYS, ASKED)) == wanted


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_the_engine_serves_the_same_afterwards(
    model_dir: Path, policy: CudaPolicy, level: int
) -> None:
    engine = start(model_dir, policy, enable_sleep=True)
    try:
        engine.load_weights(1)
        wanted = tokens(engine.generate(PROMPTS, KEYS, ASKED))
        free = torch.cuda.mem_get_info()[0]
        engine.sleep(level)
        assert torch.cuda.mem_get_info()[0] > free + 2**30
        engine.wake()
        if level == 2:
            engine.refresh()
        assert tokens(engine.generate(PROMPTS, KEYS, ASKED)) == wanted
    finally:
        engine.close()


@pytest.mark.multigpu
def test_two_gpus_share_the_model(model_dir: Path, policy: CudaPolicy) -> None:
    engine = start(model_dir, policy, tensor_parallel_size=2)
    try:
        policy.change(5)
        engine.load_weights(1)
        assert check_logprob_parity(engine, policy.logprobs).maximum < 0.25
    finally:
        engine.close()
