"""The program of one rank: runs every case once and writes what it found for `test_two_ranks.py`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from rft_core.errors import PeerError
from rft_dist.collectives import Collectives
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.strategies.data_parallel import DataParallelOptimizer, weights_hash

torch.set_num_threads(1)
SETTINGS = {"betas": (0.0, 0.9), "epsilon": 1e-6, "weight_decay": 0.01, "max_norm": 0.0}
LEARNING_RATE = 1e-3
MICRO_BATCHES = {  # step -> sizes of the micro-batches of rank 0 and of rank 1
    0: ([2, 2, 1], [5]),
    1: ([4, 3, 3], []),
    2: ([1] * 4, [6]),
}


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 3))


def inputs_of(step: int) -> torch.Tensor:
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(step))


def make_optimizer(model: nn.Module, collectives: Collectives, **changes) -> DataParallelOptimizer:
    return DataParallelOptimizer(model.named_parameters(), collectives, **{**SETTINGS, **changes})


def add_gradients(model: nn.Module, optimizer: DataParallelOptimizer, step: int, rank: int) -> None:
    sizes = MICRO_BATCHES[step]
    rest = sum(sizes[0]) if rank else 0
    for size in sizes[rank]:
        batch = inputs_of(step)[rest : rest + size]
        optimizer.backward(model(batch).square().sum() / 10)
        rest += size


def case_exchanges(collectives: Collectives) -> dict:
    rank = collectives.rank
    mine = torch.tensor([[1.0 + rank, -2.0], [0.5, 10.0 * rank]])
    total, largest = collectives.sum(mine), collectives.max(mine)
    transposed = collectives.sum(mine.T)
    floats = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
    sums = [collectives.sum(floats), collectives.sum(floats)]
    counts = collectives.sum(torch.tensor([2**40 + rank]))
    value = torch.full((3,), float(rank + 7))
    collectives.broadcast_in_place(value)
    return {
        "rank": [collectives.rank, collectives.world_size],
        "sum": total.tolist(),
        "max": largest.tolist(),
        "sum_of_transposed": transposed.tolist(),
        "input_after": mine.tolist(),
        "counts": counts.tolist(),
        "broadcast": value.tolist(),
        "sum_hashes": [hashlib.sha256(entry.numpy().tobytes()).hexdigest() for entry in sums],
    }


def case_bytes(collectives: Collectives) -> dict:
    rank = collectives.rank
    ragged = collectives.gather_bytes(bytes(range(rank * 200)))
    return {
        "ragged": [entry.hex() for entry in ragged],
        "empty": [entry.hex() for entry in collectives.gather_bytes(b"")],
        "broadcast": collectives.broadcast_bytes(b"from zero" if rank == 0 else None).hex(),
        "broadcast_empty": collectives.broadcast_bytes(b"" if rank == 0 else b"ignored").hex(),
    }


def case_training(collectives: Collectives, out: Path) -> dict:
    model = make_model()
    optimizer = make_optimizer(model, collectives)
    norms, gradients = [], {}
    for step in MICRO_BATCHES:
        add_gradients(model, optimizer, step, collectives.rank)
        norms.append(optimizer.step(LEARNING_RATE).gradient_norm)
        for name, value in optimizer.state_tensors().items():
            if name.startswith("exp_avg/"):  # with a first beta of 0, the gradient itself
                gradients[f"{step}/{name}"] = value.clone()
    save_file(gradients, out / f"gradients_{collectives.rank}.safetensors")
    small = make_model()
    small_optimizer = make_optimizer(small, collectives, bucket_bytes=500)
    for step in MICRO_BATCHES:
        add_gradients(small, small_optimizer, step, collectives.rank)
        small_optimizer.step(LEARNING_RATE)
    return {"norms": norms, "hash": optimizer.weights_hash(), "hash_small_buckets": small_optimizer.weights_hash()}


def case_not_finite(collectives: Collectives) -> dict:
    model = make_model()
    optimizer = make_optimizer(model, collectives)
    add_gradients(model, optimizer, 0, collectives.rank)
    if collectives.rank == 1:
        model[0].weight.grad[3, 3] = float("nan")
    before = optimizer.weights_hash()
    refused = optimizer.step(LEARNING_RATE)
    after = optimizer.weights_hash()
    add_gradients(model, optimizer, 1, collectives.rank)
    resumed = optimizer.step(LEARNING_RATE)
    return {
        "refused_applied": refused.applied,
        "unchanged": before == after,
        "next_applied": resumed.applied,
        "hash": optimizer.weights_hash(),
    }


def case_different_weights(collectives: Collectives) -> dict:
    model = make_model(seed=collectives.rank)
    error = ""
    try:
        make_optimizer(model, collectives)
    except PeerError as caught:
        error = caught.problem.what
    for parameter in model.parameters():
        collectives.broadcast_in_place(parameter.detach())
    make_optimizer(model, collectives)
    return {"error": error, "hash": weights_hash(model.named_parameters())}


def case_peer_leaves(collectives: Collectives) -> dict:
    if collectives.rank == 1:
        stop_process_group()
        return {"error": ""}
    try:
        collectives.sum(torch.ones(2, 3))
    except PeerError as caught:
        return {"error": caught.problem.what}
    return {"error": "none"}


def main() -> None:
    out = Path(sys.argv[1])
    collectives = start_process_group(ranks_from_environment(), torch.device("cpu"))
    results = {
        "exchanges": case_exchanges(collectives),
        "bytes": case_bytes(collectives),
        "training": case_training(collectives, out),
        "not_finite": case_not_finite(collectives),
        "different_weights": case_different_weights(collectives),
        "peer_leaves": case_peer_leaves(collectives),
    }
    (out / f"rank_{collectives.rank}.json").write_text(json.dumps(results))
    stop_process_group()
    sys.stderr.flush()
    # Rank 0 lost its peer on purpose. torch 2.13 then sometimes aborts while the C++ objects of gloo are
    # destroyed at exit; what was to be found out is written.
    os._exit(0)


if __name__ == "__main__":
    main()
