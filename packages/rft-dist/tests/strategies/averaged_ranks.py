"""The program of one rank: averages in the place of the weights for a while, under every strategy that keeps some."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tensor_ranks
import torch
from sharded_ranks import ADAM, CPU, Tiny, directly, share
from torch import Tensor

from rft_dist.collectives import Collectives
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_dist.strategies.dtensor_shards import local
from rft_dist.strategies.ema_swap import swap_in_ema
from rft_dist.strategies.fsdp import FullyShardedModel, ShardedOptimizer
from rft_dist.strategies.process_groups import TensorGroup
from rft_dist.strategies.tensor_parallel import TensorParallelModel, TensorParallelOptimizer
from rft_dist.strategies.zero.flat_ranges import own_weights
from rft_dist.strategies.zero.optimizer import ZeroModel

torch.set_num_threads(1)
DECAY = 0.75


@dataclass
class Built:
    """A model that is trained, what gives its whole weights, and what puts the averages in their place."""

    model: Any
    optimizer: Any
    compute: Callable[..., Any]
    whole: Callable[[], Iterable[tuple[str, Tensor]]]
    in_place: Callable[[], AbstractContextManager[None]]
    rank: int = 0

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.whole()}

    def held(self) -> dict[str, Tensor]:
        """What this rank has: weights and state."""
        found = {name: tensor.clone() for name, tensor in self.optimizer.state_tensors().items()}
        for name, parameter in self.model.named_parameters():
            spread = hasattr(parameter, "ds_tensor")
            own = own_weights(parameter, self.rank)[1] if spread else local(parameter.detach())
            found[name] = own.clone()
        return found


def replicated(ranks: Collectives, *, dtype: torch.dtype = torch.float32) -> Built:
    model = Tiny().to(dtype)
    narrow = dtype != torch.float32
    optimizer = DataParallelOptimizer(model.named_parameters(), ranks, **ADAM, master=narrow, ema_decay=DECAY)
    return Built(model, optimizer, directly, model.named_parameters, _in_place(model, optimizer))


def sharded(ranks: Collectives, **options: Any) -> Built:
    model = Tiny()
    blocks = FullyShardedModel(model, list(model.layers), ranks, device=CPU, **options)
    optimizer = ShardedOptimizer(model.named_parameters(), ranks, **ADAM, ema_decay=DECAY)
    return Built(model, optimizer, blocks.compute, blocks.full_tensors, _in_place(model, optimizer))


def cut(ranks: Collectives) -> Built:
    model, group = tensor_ranks.Model(), TensorGroup(ranks, 2, CPU)
    parts = TensorParallelModel(model, tensor_ranks.Plan(), group)
    optimizer = TensorParallelOptimizer(
        model.named_parameters(), group, of_heads=tensor_ranks.Plan.of_heads, **ADAM, ema_decay=DECAY
    )
    return Built(model, optimizer, directly, parts.full_tensors, _in_place(model, optimizer))


def zero(ranks: Collectives, *, stage: int, dtype: torch.dtype = torch.float32, persistent: int = 0) -> Built:
    model = Tiny().to(dtype)
    spread = ZeroModel(
        model,
        list(model.layers),
        ranks,
        device=CPU,
        stage=stage,
        persistent_numel=persistent,
        ema_decay=DECAY,
        **ADAM,  # type: ignore[arg-type]
    )
    swap = spread.optimizer.swap_in_ema
    return Built(model, spread.optimizer, spread.compute, spread.full_tensors, swap, ranks.rank)


def _in_place(model: Any, optimizer: Any) -> Callable[[], AbstractContextManager[None]]:
    return partial(swap_in_ema, dict(model.named_parameters()), optimizer.state_tensors)


CASES: dict[str, Callable[[Collectives], Built]] = {
    "replicated": replicated,
    "replicated bfloat16": partial(replicated, dtype=torch.bfloat16),
    "fsdp": sharded,
    "fsdp bfloat16": partial(sharded, compute_dtype=torch.bfloat16),
    "fsdp in host memory": partial(sharded, cpu_offload=True),
    "fsdp hybrid": partial(sharded, shard_size=1),
    "tensor": cut,
    "zero 1": partial(zero, stage=1),
    "zero 1 bfloat16": partial(zero, stage=1, dtype=torch.bfloat16),
    "zero 2": partial(zero, stage=2),
    "zero 3": partial(zero, stage=3),
    "zero 3 bfloat16": partial(zero, stage=3, dtype=torch.bfloat16),
    "zero 3 gathered": partial(zero, stage=3, persistent=100_000),
}


def step(built: Built, number: int, ranks: Collectives) -> None:
    together = isinstance(built.model, tensor_ranks.Model)
    rows = share(number, 0, 1) if together else share(number, ranks.rank, ranks.world_size)
    for place, tokens in enumerate(rows, start=1):
        built.optimizer.backward(built.compute(built.model.loss, tokens), last=place == len(rows))
    built.optimizer.step(1e-2)


def run(make: Callable[[Collectives], Built], ranks: Collectives) -> dict[str, Any]:
    """Three steps, the averages looked at after the second; against three steps in a row."""
    twin = make(ranks)
    average = {name: tensor.double() for name, tensor in twin.weights().items()}
    for number in (0, 1):
        step(twin, number, ranks)
        for name, tensor in twin.weights().items():
            average[name] += (1 - DECAY) * (tensor.double() - average[name])
    step(twin, 2, ranks)
    expected, expected_weights = twin.held(), twin.weights()
    built = make(ranks)
    for number in (0, 1):
        step(built, number, ranks)
    before, last = built.held(), built.weights()
    with built.in_place():
        seen = built.weights()
        with torch.no_grad():
            loss = float(built.compute(built.model.loss, share(7, 0, 1)[0]))
    back = equal(before, built.held()), equal(last, built.weights())
    step(built, 2, ranks)
    return {
        "distance": max(_distance(seen[name].double(), average[name]) for name in average),
        "moved": max(_distance(seen[name].double(), last[name].double()) for name in average),
        "loss": loss,
        "back": all(back),
        "goes on": all([equal(built.held(), expected), equal(built.weights(), expected_weights)]),
    }


def _distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).norm() / second.norm().clamp(min=1e-12))


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def main() -> None:
    out = Path(sys.argv[1])
    ranks = start_process_group(ranks_from_environment(), CPU)
    results = {name: run(make, ranks) for name, make in CASES.items()}
    (out / f"rank_{ranks.rank}.json").write_text(json.dumps(results))
    stop_process_group()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
