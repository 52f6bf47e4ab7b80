"""The program of one rank: the same three steps on whole matrices and on parts of them, and what a rank then holds."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from sharded_ranks import ADAM, CPU, NUM_STEPS, SEEDED, share
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rft_core.errors import OptionsError
from rft_dist.collectives import Collectives
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_dist.strategies.dtensor_shards import is_first_copy, local, num_copies, start_of
from rft_dist.strategies.fsdp import FullyShardedModel
from rft_dist.strategies.process_groups import TensorGroup
from rft_dist.strategies.tensor_parallel import TensorParallelModel, TensorParallelOptimizer
from rft_dist.strategies.tensor_parallel_fsdp import TensorShardedOptimizer

torch.set_num_threads(1)
VOCABULARY, WIDTH, HEAD = 11, 6, 4


class Layer(nn.Module):
    """Two heads with a gain that both share, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * HEAD), nn.Linear(2 * HEAD, WIDTH)
        self.gain, self.norm = nn.Parameter(torch.linspace(0.5, 1.5, HEAD)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden_TD: Tensor) -> Tensor:
        heads = self.up(hidden_TD * self.norm).unflatten(-1, (-1, HEAD)) * self.gain
        return self.down(torch.tanh(heads).flatten(-2))


class Model(nn.Module):
    """A matrix with a row a token, used at both ends; 11 tokens, which two ranks do not divide, one of them padding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with SEEDED:
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)  # its values go; they are drawn as the others are
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def loss(self, tokens_T: Tensor) -> Tensor:
        hidden_TD = self.embedding(tokens_T[:-1])
        for layer in self.layers:
            hidden_TD = hidden_TD + layer(hidden_TD)
        weight = self.head.weight
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return nn.functional.cross_entropy((hidden_TD @ whole.T).float(), tokens_T[1:], reduction="sum") / 100


@dataclass
class Plan:
    by_outputs = tuple(f"layers.{i}.up" for i in range(2))
    by_inputs = tuple(f"layers.{i}.down" for i in range(2))
    of_heads = tuple(f"layers.{i}.gain" for i in range(2))
    vocabulary = ("embedding", "head")


def train(model: Model, optimizer, data_rank: int, data_size: int, steps=range(NUM_STEPS)) -> list[float]:
    """Data rank 0 has more micro-batches than the others."""
    norms = []
    for step in steps:
        for tokens in share(step, data_rank, data_size):
            optimizer.backward(model.loss(tokens))
        if data_rank == 0:
            optimizer.backward(model.loss(torch.arange(5) + step))
        norms.append(optimizer.step(1e-2).gradient_norm)
    return norms


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}


def case_whole(ranks: Collectives, out: Path, name: str, dtype: torch.dtype, **options) -> dict:
    """Every rank of a group of two has the samples of one, so half of the ranks train."""
    model = Model(dtype)
    optimizer = DataParallelOptimizer(model.named_parameters(), ranks, **ADAM, **options)
    norms = []
    for step in range(NUM_STEPS):
        if ranks.rank % 2 == 0:
            for tokens in share(step, ranks.rank // 2, ranks.world_size // 2):
                optimizer.backward(model.loss(tokens))
        if ranks.rank == 0:
            optimizer.backward(model.loss(torch.arange(5) + step))
        norms.append(optimizer.step(1e-2).gradient_norm)
    save_file(whole_weights(model), out / f"{name}_{ranks.rank}.safetensors")
    state = {key.partition("/"): tensor for key, tensor in optimizer.state_tensors().items()}
    moments = {parameter: tensor.clone() for (kind, _, parameter), tensor in state.items() if kind == "exp_avg"}
    save_file(moments, out / f"{name}_moments_{ranks.rank}.safetensors")
    return {"norms": norms}


def case_parts(ranks: Collectives, out: Path, name: str, dtype: torch.dtype, **options) -> dict:
    group = TensorGroup(ranks, 2, CPU)
    model = Model(dtype)
    total = sum(parameter.numel() for parameter in model.parameters())
    cut = TensorParallelModel(model, Plan(), group)
    optimizer = TensorParallelOptimizer(model.named_parameters(), group, of_heads=Plan.of_heads, **ADAM, **options)
    norms = train(model, optimizer, group.data_rank, group.data_size)
    weights = {name: tensor.float().clone() for name, tensor in cut.full_tensors()}
    save_file(weights, out / f"{name}_{ranks.rank}.safetensors")
    parameters = dict(model.named_parameters())
    return {
        "norms": norms,
        "total": total,
        "held": sum(tensor.numel() for _, tensor in cut.local_shards()),
        "memory": sum(local(p.detach()).untyped_storage().nbytes() for p in parameters.values()) // dtype.itemsize,
        "tied": model.head.weight is model.embedding.weight,
        "blocks": {n: [list(start_of(p)), list(local(p.detach()).shape)] for n, p in parameters.items()},
        "copies": {n: num_copies(p, ranks.world_size) for n, p in parameters.items()},
        "writes": [n for n, p in parameters.items() if is_first_copy(p, ranks.rank)],
        "shards": [[s.name, list(s.start), list(s.data.shape)] for s in optimizer.checkpoint_tensors()],
    }


def spread_parts(group: TensorGroup, **options) -> tuple[Model, FullyShardedModel, TensorShardedOptimizer]:
    """Parts of every matrix in blocks over the ranks that hold the same."""
    model = Model()
    TensorParallelModel(model, Plan(), group)
    layers = list(model.layers)
    spread = FullyShardedModel(model, layers, group.everyone, device=CPU, mesh=group.data_mesh, **options)
    settings = {**ADAM, "of_heads": Plan.of_heads}
    return model, spread, TensorShardedOptimizer(model.named_parameters(), group, **settings)


def train_in_step(model: Model, spread: FullyShardedModel, optimizer, group: TensorGroup, steps=range(NUM_STEPS)):
    """`train`; every rank makes as many passes, those without a micro-batch with a loss of zero."""
    norms = []
    for step in steps:
        batches = share(step, group.data_rank, group.data_size)
        for tokens in batches:
            optimizer.backward(spread.compute(model.loss, tokens))
        loss = spread.compute(model.loss, torch.arange(5) + step)
        optimizer.backward(loss * (1.0 if group.data_rank == 0 else 0.0))
        norms.append(optimizer.step(1e-2).gradient_norm)
    return norms


def case_spread(ranks: Collectives, out: Path) -> dict:
    group = TensorGroup(ranks, 2, CPU)
    model, spread, optimizer = spread_parts(group)
    norms = train_in_step(model, spread, optimizer, group)
    weights = {name: tensor.clone() for name, tensor in spread.full_tensors()}
    save_file(weights, out / f"spread_{ranks.rank}.safetensors")
    shards = [*optimizer.checkpoint_tensors()]
    save_file({f"{i}": s.data.clone() for i, s in enumerate(shards)}, out / f"spread_shards_{ranks.rank}.safetensors")
    return {
        "norms": norms,
        "total": sum(tensor.numel() for tensor in weights.values()),
        "held": sum(tensor.numel() for _, tensor in spread.local_shards()),
        "tied": model.head.weight is model.embedding.weight,
        "shards": [[s.name, list(s.global_shape), list(s.start)] for s in shards],
    }


def case_spread_resumed(ranks: Collectives) -> dict:
    """As `case_resumed`."""
    group = TensorGroup(ranks, 2, CPU)
    (model, spread, optimizer), (other, again, restored) = spread_parts(group), spread_parts(group)
    train_in_step(model, spread, optimizer, group, range(2))
    with torch.no_grad():
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            local(two).copy_(local(one))
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    for wanted in restored.shard_requests():
        restored.write(wanted.name, wanted.start, state[wanted.name])
    train_in_step(model, spread, optimizer, group, range(2, 3))
    train_in_step(other, again, restored, group, range(2, 3))
    pairs = zip(spread.full_tensors(), again.full_tensors(), strict=True)
    return {"equal": all([torch.equal(one, two) for (_, one), (_, two) in pairs])}


def case_resumed(ranks: Collectives) -> dict:
    """Two steps, the state into a new optimizer, one step more: equal to three in a row to the bit."""
    group, models, optimizers, cuts = TensorGroup(ranks, 2, CPU), [], [], []
    for _ in range(2):
        models.append(Model())
        cuts.append(TensorParallelModel(models[-1], Plan(), group))
        made = TensorParallelOptimizer(models[-1].named_parameters(), group, of_heads=Plan.of_heads, **ADAM)
        optimizers.append(made)
    train(models[0], optimizers[0], group.data_rank, group.data_size, range(2))
    with torch.no_grad():
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            local(other).copy_(local(one))
    given = {shard.name: shard for shard in optimizers[0].checkpoint_tensors()}
    state = {name: tensor.clone() for name, tensor in optimizers[0].state_tensors().items()}
    for wanted in optimizers[1].shard_requests():
        optimizers[1].write(wanted.name, wanted.start, state[wanted.name])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, group.data_rank, group.data_size, range(2, 3))
    pairs = zip(cuts[0].full_tensors(), cuts[1].full_tensors(), strict=True)
    return {"equal": all(torch.equal(one, other) for (_, one), (_, other) in pairs), "given": len(given)}


def case_not_finite(ranks: Collectives) -> dict:
    group, model = TensorGroup(ranks, 2, CPU), Model()
    cut = TensorParallelModel(model, Plan(), group)
    optimizer = TensorParallelOptimizer(model.named_parameters(), group, of_heads=Plan.of_heads, **ADAM)
    before = {name: tensor.clone() for name, tensor in cut.full_tensors()}
    optimizer.backward(model.loss(torch.arange(6)) * (float("nan") if group.data_rank == 0 else 1.0))
    refused = not optimizer.step(1e-2).applied
    same = all(torch.equal(before[name], tensor) for name, tensor in cut.full_tensors())
    return {"refused": refused, "unchanged": same}


def case_sizes(ranks: Collectives) -> dict:
    try:
        TensorGroup(ranks, 3, CPU)
    except OptionsError as caught:
        return {"code": caught.problem.code, "why": caught.problem.why, "do": caught.problem.do}
    return {}


def run_cases(ranks: Collectives, out: Path) -> None:
    """Every case, and a file of what this rank found."""
    results = {
        "whole": case_whole(ranks, out, "whole", torch.float32),
        "parts": case_parts(ranks, out, "parts", torch.float32),
        "whole_narrow": case_whole(ranks, out, "whole_narrow", torch.bfloat16, master=True),
        "parts_narrow": case_parts(ranks, out, "parts_narrow", torch.bfloat16, master=True),
        "spread": case_spread(ranks, out),
        "spread_resumed": case_spread_resumed(ranks),
        "resumed": case_resumed(ranks),
        "not_finite": case_not_finite(ranks),
        "sizes": case_sizes(ranks),
    }
    (out / f"rank_{ranks.rank}.json").write_text(json.dumps(results))


def main() -> None:
    run_cases(start_process_group(ranks_from_environment(), CPU), Path(sys.argv[1]))
    stop_process_group()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
