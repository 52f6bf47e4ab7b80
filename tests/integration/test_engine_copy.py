"""The native engine on a copy of the weights draws what it draws on the weights themselves, in a run too."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.stale_runs import MAX_LEN, VOCAB, StaleRun, tied_policy
from support.trainer_task import same_model

from rft.build import engines
from rft.build.engines import engine_check, native_engine
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import ServiceError
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.native.engine import NativeEngine
from rft_engine.settings import DecodingEngineSettings
from rft_models.decode.fast_decoder import decoder_for
from rft_models.policy.causal_policy import CausalPolicy

PROMPTS = [[3, 9, 11], [5], [7, 7, 30, 31, 6, 40]]
KEYS = [[10, 11], [20, 21, 22], [30]]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0, "max_new_tokens": 7},
    {"temperature": 0.7, "top_p": 0.8, "max_new_tokens": 5, "stop_token_ids": tuple(range(2, 12))},
    {"temperature": 0.0, "max_new_tokens": 6},
]
MACHINE: Any = SimpleNamespace(device="cpu", ranks=SimpleNamespace(rank=1))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def change(policy: CausalPolicy) -> None:
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter.add_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))


@pytest.fixture
def always_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where parameters are sharded."""
    monkeypatch.setattr(engines, "needs_copy", lambda policy, dtype=None: True)


@pytest.mark.usefixtures("always_copied")
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "gpt2"])
def test_the_same_tokens_and_log_probs_to_the_bit(family: str) -> None:
    policy = tied_policy(family, 3)
    shared = NativeEngine(decoder_for(policy), max_rows=4, max_len=MAX_LEN)
    engine = native_engine(policy, 4, MAX_LEN, "cpu")
    trie = TokenTrie.of([[3, 4], [5, 6, 7], [5, 8], [9, 1]])
    for version in (1, 2):
        for each in (shared, engine):
            each.load_weights(version)
        for options in OPTIONS:
            assert engine.generate(PROMPTS, KEYS, SamplingOptions(**options)) == shared.generate(
                PROMPTS, KEYS, SamplingOptions(**options)
            )
        assert isinstance(engine, NativeEngineOnCopy)
        assert engine.beam_search(PROMPTS, trie, num_beams=2) == shared.beam_search(PROMPTS, trie, num_beams=2)
        change(policy)


def test_an_engine_that_computes_in_another_type_is_a_copy() -> None:
    policy = tied_policy("qwen2", 3)
    assert type(native_engine(policy, 4, MAX_LEN, "cpu")) is NativeEngine
    assert type(native_engine(policy, 4, MAX_LEN, "cpu", dtype=torch.float32)) is NativeEngine
    engine = native_engine(policy, 4, MAX_LEN, "cpu", dtype=torch.bfloat16)
    assert isinstance(engine, NativeEngineOnCopy)
    assert engine.facts.dtype == "bfloat16"
    check = engine_check(DecodingEngineSettings(engine_type="native"), MACHINE, policy, engine)
    assert check is not None
    [gap, number] = check(0)["engine/probe_gap"]
    assert 1e-4 < gap < 0.25
    assert number == 1.0
    rounded = tied_policy("qwen2", 3)
    rounded.model.to(torch.bfloat16)
    rounded.model.model.rotary_emb.inv_freq = policy.model.model.rotary_emb.inv_freq
    expected = NativeEngine(decoder_for(rounded), max_rows=4, max_len=MAX_LEN)
    for options in OPTIONS:
        assert engine.generate(PROMPTS, KEYS, SamplingOptions(**options)) == expected.generate(
            PROMPTS, KEYS, SamplingOptions(**options)
        )


@pytest.mark.usefixtures("always_copied")
def test_the_check_of_a_run_knows_version_and_rank() -> None:
    policy = tied_policy("llama", 3)
    engine, settings = native_engine(policy, 4, MAX_LEN, "cpu"), DecodingEngineSettings(engine_type="native")
    assert engine_check(settings, MACHINE, policy, NativeEngine(decoder_for(policy), max_rows=1, max_len=8)) is None
    check = engine_check(settings, MACHINE, policy, engine)
    assert check is not None
    engine.load_weights(5)
    assert check(5)["engine/probe_gap"][0] < 1e-4
    change(policy)
    with pytest.raises(
        ServiceError, match="engine replica 1 serves weights v5, trainer is at v5; 20 of 20 tensors"
    ) as caught:
        check(5)
    assert caught.value.problem.code == "engine.logprob_parity"


@pytest.mark.usefixtures("always_copied")
def test_a_run_on_a_copy_ends_with_the_same_weights(fit: Callable[..., Path], plain: Path) -> None:
    run = fit()
    assert same_model(run, plain)

    def rows(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]

    assert [row["reward/mean"] for row in rows(run)] == [row["reward/mean"] for row in rows(plain)]
    assert max(row["engine/probe_gap"] for row in rows(run)) < 1e-5
    assert not any("engine/probe_gap" in row for row in rows(plain))


def test_sleep_of_level_2_frees_the_copy_between_rollouts(tmp_path: Path) -> None:
    run = StaleRun(tmp_path / "run", 0)
    whole = sum(4 * parameter.numel() for _, parameter in run.policy.named_parameters())
    run.step()
    assert run.copy.num_bytes == whole
    run.replicas.sleep(2)
    assert run.copy.num_bytes == 0
    run.replicas.wake()
    with pytest.raises(ServiceError) as caught:
        run.replicas.generate([[VOCAB - 1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=1))
    assert caught.value.problem.code == "engine.state"
    run.engine.refresh()
    assert run.copy.num_bytes == whole
    run.step()
    assert _versions(run) == [2]


def _versions(run: StaleRun) -> Sequence[int]:
    return [engine.weight_version for engine in run.replicas.engines]
