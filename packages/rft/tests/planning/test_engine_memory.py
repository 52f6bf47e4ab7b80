"""Memory of an engine on a rank: a whole copy, joined matrices, or a share of the GPU, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rft.planning.engine_memory import engine_parts, joined_weights, sleeps
from rft_dist.planning.memory_estimate import DecoderSizes, TrainingMemoryConfig
from rft_dist.planning.parallel_dims import ParallelDims
from rft_dist.planning.run_layout import RunLayout
from rft_dist.strategies.registry import FULLY_SHARDED

SIZES = DecoderSizes(vocab=100, hidden=16, layers=3, query_width=16, kv_width=8, ffn=40, tied=True)
RUN = TrainingMemoryConfig(weight_bytes=2, cache_tokens=50)
SHARDED = replace(RUN, layout=RunLayout(dims=ParallelDims(1, 4), policy=FULLY_SHARDED))
NATIVE = {"engine_type": "native", "engine_replicas": 1, "enable_engine_sleep": True}
VLLM = {**NATIVE, "engine_type": "vllm", "engine_tp_size": 1, "engine_mem_util": 0.5}
GIB = 2**30


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return {"pretrain": str(tmp_path)}


def held(
    values: dict[str, Any], run: TrainingMemoryConfig = RUN, memory: int | None = None
) -> dict[str, tuple[int, bool, bool]]:
    """(bytes, while training, in host memory) of each term."""
    terms = engine_parts(values, SIZES, run, memory).terms
    assert all(term.in_rollout for term in terms)
    return {term.name: (term.num_bytes, term.in_training, term.on_host) for term in terms}


def test_whole_weights_are_shared_and_some_matrices_joined_beside_them(values: dict[str, Any]) -> None:
    assert held(values | NATIVE) == {"joined matrices": (3 * (16 * 32 + 2 * 16 * 40) * 2, True, False)}
    assert held(values | NATIVE | {"engine_type": "auto"}) == held(values | NATIVE)
    assert held(values | NATIVE | {"engine_type": "hf"}) == {}
    assert engine_parts(values | NATIVE, replace(SIZES, num_experts=4), RUN, None).terms == []
    Path(values["pretrain"], "config.json").write_text(json.dumps({"model_type": "gemma"}))
    assert held(values | NATIVE) == {}
    assert held(values) == {}, "supervised training has no engine"


@pytest.mark.parametrize(
    ("targets", "more"), [("all-linear", 16 * 16 + 40 * 16), ("q_proj,down_proj", 40 * 16), ("q_proj", 0)]
)
def test_layers_with_adapters_are_folded_into_matrices_of_their_own(targets: str, more: int) -> None:
    usual = 16 * 32 + 2 * 16 * 40
    assert joined_weights({"lora_rank": 4, "target_modules": targets}, SIZES) == 3 * (usual + more)
    assert joined_weights({"lora_rank": 0, "target_modules": targets}, SIZES) == 3 * usual


@pytest.mark.parametrize("run", [SHARDED, replace(RUN, layout=RunLayout(dims=ParallelDims(1, 4, tp_size=4)))])
def test_where_no_rank_has_the_weights_whole_the_engine_has_a_copy(
    values: dict[str, Any], run: TrainingMemoryConfig
) -> None:
    assert held(values | NATIVE, run) == {"engine's copy": (2 * SIZES.parameters, True, False)}
    rounded = replace(run, weight_bytes=4, narrow_compute=True)
    assert held(values | NATIVE, rounded) == {"engine's copy": (2 * SIZES.parameters, True, False)}


def test_an_engine_with_a_process_of_its_own_takes_a_share_and_sleeps_on_the_host(values: dict[str, Any]) -> None:
    asleep = (2 * SIZES.parameters, True, True)
    assert held(values | VLLM, memory=10) == {
        "engine's share": (5 * GIB, False, False),
        "engine's copy asleep": asleep,
    }
    awake = {"enable_engine_sleep": False}
    assert held(values | VLLM | awake, memory=10) == {"engine's share": (5 * GIB, True, False)}
    assert held(values | VLLM) == {"engine's copy asleep": asleep}
    two = held(values | VLLM | {"engine_tp_size": 2, "engine_fp8": True}, memory=10)
    assert two["engine's copy asleep"][0] == -(-SIZES.parameters // 2)


def test_the_share_names_the_sequences_that_it_holds(values: dict[str, Any]) -> None:
    [share, _] = engine_parts(values | VLLM, SIZES, RUN, 1).terms
    fitting = (GIB // 2 - 2 * SIZES.parameters) // (50 * 2 * 3 * 8 * 2)
    assert share.formula.endswith(f"at most {fitting:,} sequences of 50 tokens")


@pytest.mark.parametrize(
    ("changes", "memory", "named"),
    [
        ({}, None, "with --gpu_memory"),
        ({"engine_mem_util": None}, 10, "with --engine_mem_util and --gpu_memory"),
        ({"engine_mem_util": 1e-5}, 1, "no room for one sequence"),
        ({"engine_replicas": 2}, 10, "2 engines a rank"),
    ],
)
def test_what_is_not_counted_or_cannot_work_is_said(
    values: dict[str, Any], changes: dict[str, Any], memory: int | None, named: str
) -> None:
    [note] = engine_parts(values | VLLM | changes, SIZES, RUN, memory).notes
    assert named in note
    assert engine_parts(values | VLLM, SIZES, RUN, 10).notes == []


def test_an_engine_that_runs_ahead_does_not_sleep() -> None:
    assert sleeps({"enable_engine_sleep": True, "max_staleness": 0})
    assert not sleeps({"enable_engine_sleep": True, "max_staleness": 1})
    assert not sleeps({"enable_engine_sleep": False})
