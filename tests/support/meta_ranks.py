"""The program of one rank: models loaded whole and spread, and made without memory and read block by block."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.parallel.parallelize import ParallelModel, parallelize, trainable_policy
from rft.parallel.shardable import ShardablePolicy
from rft.process.machine import Machine
from rft_core.packed_tokens import PackedTokens
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.planning.live_bytes import LiveBytes
from rft_dist.settings import AdamSettings, StrategySettings
from rft_dist.strategies.dtensor_shards import local
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.settings import AdapterSettings, ModelSettings

torch.set_num_threads(1)
CASES: dict[str, dict[str, Any]] = {
    "blocks": {},
    "on the host": {"fsdp_cpu_offload": True},
    "in bfloat16": {"use_mp_opt": True},
}


def lay_out(source: Path, machine: Machine, **strategy: Any) -> tuple[ParallelModel[CausalPolicy], int]:
    """A policy on the ranks, and the most bytes that were alive on the way there."""
    settings, chosen = ModelSettings(pretrain=str(source)), StrategySettings(fsdp=True, **strategy)
    tokenizer: Any = object()
    with LiveBytes(full=True) as live:
        policy = trainable_policy(settings, chosen, source, machine, tokenizer, AdapterSettings())
        spread = parallelize(ShardablePolicy(policy), chosen, AdamSettings(), machine, None)
        del policy
    return spread, live.peak


def held(spread: ParallelModel[CausalPolicy]) -> dict[str, Tensor]:
    model = spread.model.model
    found = {name: local(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def step(spread: ParallelModel[CausalPolicy], rank: int) -> tuple[Tensor, float]:
    tokens = torch.randint(0, 40, (12,), generator=torch.Generator().manual_seed(rank))
    places, segments = torch.arange(6).repeat(2), torch.arange(2).repeat_interleave(6)
    logprobs_T, _ = spread.model.token_logprobs(
        PackedTokens(tokens, places, segments, torch.ones(12, dtype=torch.bool))
    )
    spread.optimizer.backward(-logprobs_T.sum() / 20, last=True)
    return logprobs_T.detach(), float(spread.optimizer.step(1e-3).gradient_norm)


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def case(source: Path, machine: Machine, **strategy: Any) -> dict[str, Any]:
    rank = machine.ranks.rank
    whole, whole_peak = lay_out(source, machine, **strategy)
    before, (logprobs_T, norm) = held(whole), step(whole, rank)
    after = held(whole)
    del whole
    gc.collect()
    blocks, peak = lay_out(source, machine, meta_init=True, **strategy)
    same = equal(before, held(blocks))
    again_T, again = step(blocks, rank)
    config = blocks.model.model.generation_config
    return {
        "same": same,
        "same_forward": bool(torch.equal(logprobs_T, again_T)),
        "same_norm": norm == again,
        "same_after": equal(after, held(blocks)),
        "tied": len({id(p) for p in blocks.model.model.parameters()}) == len(list(blocks.model.model.parameters())),
        "peak": peak,
        "whole_peak": whole_peak,
        "eos": config.eos_token_id,
    }


def main() -> None:
    out, models = Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]]
    info = ranks_from_environment()
    machine = Machine("cpu", info, start_process_group(info, torch.device("cpu")))
    results = {
        f"{source.name} {name}": case(source, machine, **strategy)
        for source in models
        for name, strategy in CASES.items()
    }
    (out / f"rank_{info.rank}.json").write_text(json.dumps(results))
    stop_process_group()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
