"""The program of one rank: the same three steps under every strategy, on a model with a tied output matrix."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rft_core.errors import OptionsError
from rft_dist.collectives import Collectives
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.optim.parameter_groups import ParameterGroups
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_dist.strategies.dtensor_shards import is_first_copy, is_sharded, local, start_of
from rft_dist.strategies.fsdp import FullyShardedModel, ShardedOptimizer

torch.set_num_threads(1)
ADAM = {"betas": (0.9, 0.95), "epsilon": 1e-6, "weight_decay": 0.1, "max_norm": 0.5}
MATRICES = frozenset({f"layers.{layer}.{part}.weight" for layer in (0, 1) for part in (0, 2)} | {"short", "stack"})
MUON = {**ADAM, "groups": ParameterGroups(matrices=MATRICES, embeddings=frozenset({"embedding.weight"}))}
CPU = torch.device("cpu")
NUM_STEPS, BATCH, VOCABULARY, WIDTH = 3, 12, 11, 6
SEEDED = threading.Lock()
"""Held while a model is drawn from the seed, which ranks that are threads share."""


class Tiny(nn.Module):
    """Two layers, a gain of three numbers (fewer than four ranks), and a matrix used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        with SEEDED:
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)) for _ in range(2)
            )
            self.gain = nn.Parameter(torch.ones(3))
            self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def states(self, tokens_T: Tensor) -> Tensor:
        hidden_TD = self.embedding(tokens_T)
        for layer in self.layers:
            hidden_TD = hidden_TD + layer(hidden_TD)
        return self.frozen(self.mixed(hidden_TD)) * self.gain.repeat(2)

    def mixed(self, hidden_TD: Tensor) -> Tensor:
        return hidden_TD

    def loss(self, tokens_T: Tensor) -> Tensor:
        """The output matrix is read outside of any forward, as the trainer's head does."""
        logits_TV = self.states(tokens_T[:-1]) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits_TV.float(), tokens_T[1:], reduction="sum") / 100


class Matrices(Tiny):
    """Also a matrix of fewer rows than four ranks, and a stack of matrices, which is cut between them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.short = nn.Parameter(torch.randn(3, WIDTH, generator=generator))
        self.stack = nn.Parameter(torch.randn(5, 2, WIDTH, generator=generator))

    def mixed(self, hidden_TD: Tensor) -> Tensor:
        mixed_TD = hidden_TD @ self.short.mT @ self.short
        return hidden_TD + 0.1 * (mixed_TD + (mixed_TD @ self.stack.mT @ self.stack).sum(0))


def share(step: int, rank: int, world_size: int) -> list[Tensor]:
    """This rank's micro-batches of a step: all tokens of the step are the same whatever the number of ranks."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, VOCABULARY, (BATCH, 9), generator=generator)
    return list(rows[rank::world_size].unbind(0))


def train(model: Tiny, optimizer: DataParallelOptimizer | ShardedOptimizer, compute, ranks: Collectives) -> list[float]:
    norms = []
    for step in range(NUM_STEPS):
        for tokens in share(step, ranks.rank, ranks.world_size):
            optimizer.backward(compute(model.loss, tokens))
        norms.append(optimizer.step(1e-2).gradient_norm)
    return norms


def directly(function, *arguments):
    return function(*arguments)


def made_for(adam: dict) -> Tiny:
    return Matrices() if adam is MUON else Tiny()


def case_replicated(ranks: Collectives, out: Path, name: str = "replicated", adam: dict = ADAM) -> dict:
    model = made_for(adam)
    optimizer = DataParallelOptimizer(model.named_parameters(), ranks, **adam)
    norms = train(model, optimizer, directly, ranks)
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, out / f"{name}_{ranks.rank}.safetensors")
    return {"norms": norms}


def case_sharded(ranks: Collectives, out: Path, name: str, adam: dict = ADAM, **options) -> dict:
    model = made_for(adam)
    total = sum(parameter.numel() for parameter in model.parameters())
    sharded = FullyShardedModel(model, list(model.layers), ranks, device=CPU, **options)
    optimizer = ShardedOptimizer(model.named_parameters(), ranks, **adam)
    norms = train(model, optimizer, sharded.compute, ranks)
    save_file({n: p.clone() for n, p in sharded.full_tensors()}, out / f"{name}_{ranks.rank}.safetensors")
    held = sum(local(parameter.detach()).numel() for parameter in model.parameters())
    blocks = {n: [list(start_of(p)), list(local(p.detach()).shape)] for n, p in model.named_parameters()}
    moments = sum(t.numel() for n, t in optimizer.state_tensors().items() if n.startswith("exp_avg/"))
    return {
        "norms": norms,
        "held": held,
        "total": total,
        "moments": moments,
        "blocks": blocks,
        "sharded": all(is_sharded(p) for p in model.parameters()),
        "writes": [n for n, p in model.named_parameters() if is_first_copy(p, ranks.rank)],
    }


def case_resumed(ranks: Collectives, adam: dict = ADAM) -> dict:
    """Two steps, all state into a new model, one step more: equal to three in a row."""
    model = made_for(adam)
    sharded = FullyShardedModel(model, list(model.layers), ranks, device=CPU)
    optimizer = ShardedOptimizer(model.named_parameters(), ranks, **adam)

    def one(step: int, model: Tiny, sharded: FullyShardedModel, optimizer: ShardedOptimizer) -> None:
        for tokens in share(step, ranks.rank, ranks.world_size):
            optimizer.backward(sharded.compute(model.loss, tokens))
        optimizer.step(1e-2)

    one(0, model, sharded, optimizer)
    weights = {name: tensor.clone() for name, tensor in sharded.full_tensors()}
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    other = made_for(adam)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other_sharded = FullyShardedModel(other, list(other.layers), ranks, device=CPU)
    other_sharded.load_shards(
        lambda name, start, shape: weights[name][
            tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        ],
        CPU,
    )
    other_optimizer = ShardedOptimizer(other.named_parameters(), ranks, **adam)
    other_optimizer.load_state_tensors(state)
    one(1, model, sharded, optimizer)
    one(1, other, other_sharded, other_optimizer)
    pairs = zip(sharded.full_tensors(), other_sharded.full_tensors(), strict=True)
    return {"equal": all(torch.equal(a, b) for (_, a), (_, b) in pairs)}


def case_not_finite(ranks: Collectives, out: Path) -> dict:
    del out
    model = Tiny()
    sharded = FullyShardedModel(model, list(model.layers), ranks, device=CPU)
    optimizer = ShardedOptimizer(model.named_parameters(), ranks, **ADAM)
    before = {name: tensor.clone() for name, tensor in sharded.full_tensors()}
    tokens = share(0, ranks.rank, ranks.world_size)[0]
    optimizer.backward(sharded.compute(model.loss, tokens) * (float("nan") if ranks.rank == 1 else 1.0))
    refused = optimizer.step(1e-2)
    same = all(torch.equal(before[name], tensor) for name, tensor in sharded.full_tensors())
    optimizer.backward(sharded.compute(model.loss, tokens) * 1e25)
    return {"refused": not refused.applied, "unchanged": same, "large": optimizer.step(1e-2).applied}


def case_shard_size(ranks: Collectives, out: Path) -> dict:
    del out
    try:
        FullyShardedModel(Tiny(), [], ranks, device=CPU, shard_size=3)
    except OptionsError as caught:
        return {"why": caught.problem.why, "do": caught.problem.do}
    return {"why": "", "do": ""}


def run_cases(ranks: Collectives, out: Path) -> None:
    """Every case, and a file of what this rank found."""
    results = {
        "replicated": case_replicated(ranks, out),
        "fsdp": case_sharded(ranks, out, "fsdp"),
        "kept": case_sharded(ranks, out, "kept", reshard_after_forward=False),
        "offload": case_sharded(ranks, out, "offload", cpu_offload=True),
        "bfloat16": case_sharded(ranks, out, "bfloat16", compute_dtype=torch.bfloat16),
        "resumed": case_resumed(ranks),
        "muon replicated": case_replicated(ranks, out, "muon_replicated", MUON),
        "muon": case_sharded(ranks, out, "muon", MUON),
        "muon offload": case_sharded(ranks, out, "muon_offload", MUON, cpu_offload=True),
        "muon resumed": case_resumed(ranks, MUON),
        "not_finite": case_not_finite(ranks, out),
        "shard_size": case_shard_size(ranks, out),
    }
    if ranks.world_size == 4:
        results["hybrid"] = case_sharded(ranks, out, "hybrid", shard_size=2)
        results["muon hybrid"] = case_sharded(ranks, out, "muon_hybrid", MUON, shard_size=2)
    (out / f"rank_{ranks.rank}.json").write_text(json.dumps(results))


def main() -> None:
    run_cases(start_process_group(ranks_from_environment(), CPU), Path(sys.argv[1]))
    stop_process_group()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
