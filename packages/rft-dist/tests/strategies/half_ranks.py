"""The program of one rank: float16 under a loss scale, and averages of weights, under every strategy that has them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sharded_ranks import ADAM, CPU, Tiny, directly, share
from torch import Tensor

from rft_dist.checkpoint_format.shards import Shard
from rft_dist.collectives import Collectives
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.optim.loss_scaler import KEY, LossScaler
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_dist.strategies.dtensor_shards import local, start_of
from rft_dist.strategies.fsdp import FullyShardedModel, ShardedOptimizer
from rft_dist.strategies.zero.optimizer import ZeroModel

torch.set_num_threads(1)
BAD = -1
"""A step in which the last micro-batch of rank 1, and of no other, has an infinite loss."""
DECAY = 0.75
Built = tuple[Tiny, Any, Callable[..., Any]]


def replicated(
    ranks: Collectives, *, half: bool, scaler: LossScaler | None = None, decay: float | None = None
) -> Built:
    model = Tiny().to(torch.float16 if half else torch.float32)
    optimizer = DataParallelOptimizer(
        model.named_parameters(), ranks, **ADAM, master=half, scaler=scaler, ema_decay=decay
    )
    return model, optimizer, directly


def sharded(ranks: Collectives, *, half: bool, scaler: LossScaler | None = None, decay: float | None = None) -> Built:
    model = Tiny()
    dtype = torch.float16 if half else None
    blocks = FullyShardedModel(model, list(model.layers), ranks, device=CPU, compute_dtype=dtype)
    return (
        model,
        ShardedOptimizer(model.named_parameters(), ranks, **ADAM, scaler=scaler, ema_decay=decay),
        blocks.compute,
    )


def run(built: Built, steps: list[int], ranks: Collectives) -> list[list[Any]]:
    """[applied, norm, scale] of every step."""
    model, optimizer, compute = built
    told = []
    for step in steps:
        batches = share(max(step, 0), ranks.rank, ranks.world_size)
        for number, tokens in enumerate(batches, start=1):
            loss = compute(model.loss, tokens)
            bad = step == BAD and ranks.rank == 1 and number == len(batches)
            optimizer.backward(loss * float("inf") if bad else loss)
        outcome = optimizer.step(1e-2)
        told.append([outcome.applied, outcome.gradient_norm, outcome.loss_scale])
    return told


def held(built: Built) -> dict[str, Tensor]:
    """What this rank has: weights and state."""
    model, optimizer, _ = built
    weights = {name: local(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return weights | {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def case_skip(make: Callable[..., Built], ranks: Collectives) -> dict[str, Any]:
    """An overflow between steps, against the same steps without it and with the scale that it left."""
    disturbed, clean = make(ranks, half=True, scaler=LossScaler()), make(ranks, half=True, scaler=LossScaler())
    told = run(disturbed, [0, BAD, 1, 2], ranks)
    run(clean, [0], ranks)
    clean[1].load_state_tensors(clean[1].state_tensors() | {KEY: torch.tensor([2.0**15, 0, 1], dtype=torch.float64)})
    run(clean, [1, 2], ranks)
    return {
        "applied": [applied for applied, _, _ in told],
        "scales": [scale for _, _, scale in told],
        "equal": equal(held(disturbed), held(clean)),
    }


def case_near(make: Callable[..., Built], ranks: Collectives) -> dict[str, Any]:
    """The norms of three steps in float16 and in float32."""
    half = run(make(ranks, half=True, scaler=LossScaler()), [0, 1, 2], ranks)
    full = run(make(ranks, half=False), [0, 1, 2], ranks)
    return {"half": [norm for _, norm, _ in half], "full": [norm for _, norm, _ in full]}


def case_resumed(ranks: Collectives) -> dict[str, Any]:
    """Blocks as they are saved, into another optimizer, by the names and places that it wants."""
    first = sharded(ranks, half=True, scaler=LossScaler(), decay=DECAY)
    run(first, [0, BAD, 1], ranks)
    own = {(shard.name, shard.start): shard.data.clone() for shard in first[1].checkpoint_tensors()}
    second = sharded(ranks, half=True, scaler=LossScaler(), decay=DECAY)
    for mine, theirs in zip(second[0].parameters(), first[0].parameters(), strict=True):
        local(mine.detach()).copy_(local(theirs.detach()))
    steps = {name: tensor for name, tensor in first[1].state_tensors().items() if name.startswith(("step/", KEY))}
    for want in second[1].shard_requests():
        found = steps.get(want.name)
        second[1].write(want.name, want.start, own[want.name, want.start] if found is None else found.clone())
    told = run(first, [2], ranks) == run(second, [2], ranks)
    return {"told": told, "equal": equal(held(first), held(second)), "writes_scale": any(n == KEY for n, _ in own)}


def case_averages(ranks: Collectives) -> dict[str, Any]:
    """Largest relative distance of the averages in blocks from those of replicas."""
    one = replicated(ranks, half=False, decay=DECAY)
    run(one, [0, 1, 2], ranks)
    expected = {name: tensor for name, tensor in one[1].state_tensors().items() if name.startswith("ema/")}
    weights = dict(one[0].named_parameters())
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    found = {"moved": min(float((expected[f"ema/{n}"] - w).norm() / w.norm()) for n, w in trained.items())}
    blocks = sharded(ranks, half=False, decay=DECAY)
    run(blocks, [0, 1, 2], ranks)
    places = {f"ema/{name}": start_of(parameter) for name, parameter in blocks[0].named_parameters()}
    own = [
        Shard(name, tuple(expected[name].shape), places[name], tensor)
        for name, tensor in blocks[1].state_tensors().items()
        if name in expected
    ]
    found["fsdp"] = distance(own, expected)
    for stage in (1, 3):
        model = Tiny()
        zero = ZeroModel(
            model, list(model.layers), ranks, device=CPU, stage=stage, persistent_numel=0, ema_decay=DECAY, **ADAM
        )
        run((model, zero.optimizer, zero.compute), [0, 1, 2], ranks)
        mine = [shard for shard in zero.optimizer.checkpoint_tensors() if shard.name.startswith("ema/")]
        found[f"zero {stage}"] = distance(mine, expected)
        again = ZeroModel(Tiny(), [], ranks, device=CPU, stage=stage, persistent_numel=0, ema_decay=DECAY, **ADAM)
        again.optimizer.load_state_tensors(zero.optimizer.state_tensors())
        found[f"zero {stage} loaded"] = distance(
            [shard for shard in again.optimizer.checkpoint_tensors() if shard.name.startswith("ema/")], expected
        )
    return found


def distance(blocks: list[Shard], expected: dict[str, Tensor]) -> float:
    assert blocks
    worst = 0.0
    for block in blocks:
        places = tuple(slice(first, first + size) for first, size in zip(block.start, block.data.shape, strict=True))
        want = expected[block.name][places]
        worst = max(worst, float((block.data - want).norm() / want.norm().clamp(min=1e-9)))
    return worst


def main() -> None:
    out = Path(sys.argv[1])
    ranks = start_process_group(ranks_from_environment(), CPU)
    results = {
        "skip replicated": case_skip(replicated, ranks),
        "skip fsdp": case_skip(sharded, ranks),
        "near replicated": case_near(replicated, ranks),
        "near fsdp": case_near(sharded, ranks),
        "resumed": case_resumed(ranks),
        "averages": case_averages(ranks),
    }
    (out / f"rank_{ranks.rank}.json").write_text(json.dumps(results))
    stop_process_group()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
