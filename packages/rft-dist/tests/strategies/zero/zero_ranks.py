"""The program of one rank: the same three steps under ZeRO 1, 2 and 3, and what is saved and loaded of them."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))  # the model and the share of the other strategies' scripts
from sharded_ranks import ADAM, CPU, NUM_STEPS, WIDTH, Tiny, directly, share
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.shards import Shard
from rft_dist.collectives import Collectives
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_dist.strategies.fsdp import FullyShardedModel, ShardedOptimizer
from rft_dist.strategies.zero.deepspeed_engine import load_deepspeed
from rft_dist.strategies.zero.optimizer import ZeroModel

torch.set_num_threads(1)
RATE = 1e-2
STAGES: dict[str, dict[str, Any]] = {f"stage_{stage}": {"stage": stage, "persistent_numel": 0} for stage in (1, 2, 3)}


class Model(Tiny):
    """Also with a matrix that only some micro-batches use, and layers that can be computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.recompute = False

    def states(self, tokens_T: Tensor) -> Tensor:
        hidden_TD = self.embedding(tokens_T)
        for layer in self.layers:
            again = checkpoint(layer, hidden_TD, use_reentrant=False) if self.recompute else layer(hidden_TD)
            assert isinstance(again, Tensor)
            hidden_TD = hidden_TD + again
        return self.frozen(hidden_TD) * self.gain.repeat(2)

    def sum_of_losses(self, rows: list[Tensor], use_extra: bool) -> Tensor:
        total = sum((self.loss(tokens_T) for tokens_T in rows), start=torch.zeros(()))
        if use_extra:
            total = total + self.extra(self.embedding(rows[0])).square().sum() / 100
        return total


def micro_batches(step: int, ranks: Collectives, num: int) -> list[tuple[list[Tensor], bool]]:
    """`num` micro-batches of rows of different lengths, and whether each uses the extra matrix: not all of them do."""
    rows = [row[: 3 + (3 * i + ranks.rank) % 7] for i, row in enumerate(share(step, ranks.rank, ranks.world_size))]
    return [(rows[i::num], step == 0 or (step == 2 and i == 1)) for i in range(num)]


def train_step(step: int, model: Model, optimizer, compute: Callable, ranks: Collectives, num: int):
    batches = micro_batches(step, ranks, num)
    for number, (rows, use_extra) in enumerate(batches, start=1):
        optimizer.backward(compute(model.sum_of_losses, rows, use_extra), last=number == num)
    return optimizer.step(RATE)


def zero_model(ranks: Collectives, model: Model | None = None, **options) -> tuple[Model, ZeroModel]:
    model, settings = model or Model(), {**ADAM, **options}
    return model, ZeroModel(model, list(model.layers), ranks, device=CPU, **settings)


def case_replicated(ranks: Collectives, out: Path, name: str, num: int = 3, max_norm: float = 0.5) -> dict:
    model = Model()
    settings: dict[str, Any] = {**ADAM, "max_norm": max_norm}
    optimizer = DataParallelOptimizer(model.named_parameters(), ranks, **settings)
    norms = [train_step(s, model, optimizer, directly, ranks, num).gradient_norm for s in range(NUM_STEPS)]
    norms.append(optimizer.step(RATE).gradient_norm)  # with no micro-batch on any rank
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    save_file(weights | copies(optimizer.state_tensors()), out / f"{name}_{ranks.rank}.safetensors")
    return {"norms": norms}


def case_zero(ranks: Collectives, out: Path, name: str, num: int = 3, recompute: bool = False, **options) -> dict:
    model = Model()
    model.recompute = recompute
    total = sum(parameter.numel() for parameter in model.parameters())
    model, zero = zero_model(ranks, model, **options)
    norms = []
    for step in range(NUM_STEPS):
        if step:  # passes that are given up leave nothing to the step
            for rows, use_extra in micro_batches(0, ranks, num):
                zero.optimizer.backward(zero.compute(model.sum_of_losses, rows, use_extra) * math.nan)
            zero.optimizer.discard()
        outcome = train_step(step, model, zero.optimizer, zero.compute, ranks, num)
        norms.append(outcome.gradient_norm)
        with torch.no_grad():  # a forward between the steps, as a rollout or an evaluation makes
            zero.compute(model.sum_of_losses, share(step, 0, 1)[:1], False)
    norms.append(zero.optimizer.step(RATE).gradient_norm)
    weights = {n: tensor.clone() for n, tensor in zero.full_tensors()}
    save_file(weights, out / f"{name}_{ranks.rank}.safetensors")
    save_shards(zero, out / f"{name}_shards_{ranks.rank}")
    moments = sum(t.numel() for n, t in zero.optimizer.state_tensors().items() if n.startswith("exp_avg/"))
    held = zero.weights.num_local()
    zero.close()
    return {"norms": norms, "held": held, "moments": moments, "total": total}


def save_shards(zero: ZeroModel, path: Path) -> None:
    """Every block with its place; file names of their own, as a checkpoint's writer does it."""
    shards: list[Shard] = [*zero.weights.shards(), *zero.optimizer.checkpoint_tensors()]
    places = [{"name": s.name, "shape": s.global_shape, "start": s.start} for s in shards]
    path.with_suffix(".json").write_text(json.dumps(places))
    save_file({f"{i}": s.data.clone() for i, s in enumerate(shards)}, path.with_suffix(".safetensors"))


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal(first: ZeroModel, second: ZeroModel) -> bool:
    """Weights, and this rank's state."""
    pairs = zip(first.full_tensors(), second.full_tensors(), strict=True)
    states = first.optimizer.state_tensors(), second.optimizer.state_tensors()
    same_state = all(torch.equal(states[0][name], states[1][name]) for name in states[0] | states[1])
    return all([torch.equal(a, b) for (_, a), (_, b) in pairs]) and same_state


def case_resumed(ranks: Collectives, dtype: torch.dtype = torch.float32, **options) -> dict:
    """A step, all state into a new model, a step more: equal to two in a row. Once by ranges, once block by block."""
    model, zero = zero_model(ranks, Model().to(dtype), **options)
    train_step(0, model, zero.optimizer, zero.compute, ranks, 2)
    weights = {name: tensor.clone() for name, tensor in zero.full_tensors()}
    state = copies(zero.optimizer.state_tensors())
    blocks = {(s.name, s.start): s.data.clone() for s in zero.optimizer.checkpoint_tensors()}
    steps = next(tensor for name, tensor in state.items() if name.startswith("step/"))
    blocks |= {(name, (0,)): tensor for name, tensor in state.items() if name == "loss_scale"}  # another rank's block
    train_step(1, model, zero.optimizer, zero.compute, ranks, 2)
    found = {}
    for way in ("ranges", "blocks"):
        other = Model().to(dtype)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other, again = zero_model(ranks, other, **options)
        again.weights.load(weights.__getitem__)
        if way == "ranges":
            again.optimizer.load_state_tensors(state)
        else:
            for want in again.optimizer.shard_requests():
                counted = want.name.startswith("step/")  # of all parameters, those of other ranks too
                again.optimizer.write(want.name, want.start, steps if counted else blocks[want.name, want.start])
        train_step(1, other, again.optimizer, again.compute, ranks, 2)
        found[way] = equal(zero, again)
        again.close()
    zero.close()
    return found


def case_from_fsdp(ranks: Collectives, **options) -> dict:
    """The state of FSDP after a step goes on under ZeRO: relative distance of the weights after the next step."""
    model = Model()
    sharded = FullyShardedModel(model, list(model.layers), ranks, device=CPU)
    optimizer = ShardedOptimizer(model.named_parameters(), ranks, **ADAM)
    train_step(0, model, optimizer, sharded.compute, ranks, 2)
    full = {name: tensor.clone() for name, tensor in sharded.full_tensors()}
    full |= whole_moments(model, optimizer, ranks)
    train_step(1, model, optimizer, sharded.compute, ranks, 2)
    other, zero = zero_model(ranks, **options)
    zero.weights.load(full.__getitem__)
    zero.optimizer.load_state(full.get)
    train_step(1, other, zero.optimizer, zero.compute, ranks, 2)
    return {"distance": distance(dict(zero.full_tensors()), dict(sharded.full_tensors()))}


def whole_moments(model: Model, optimizer: ShardedOptimizer, ranks: Collectives) -> dict[str, Tensor]:
    """FSDP's blocks by rows, put together by a sum in which every other rank has zeros."""
    found: dict[str, Tensor] = {}
    own = optimizer.state_tensors()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        counts = own.get(f"step/{name}", torch.zeros(()))
        found[f"step/{name}"] = ranks.max(counts)
        for kind in ("exp_avg", "exp_avg_sq"):
            rows = -(-parameter.shape[0] // ranks.world_size)
            whole = torch.zeros(parameter.shape)
            block = own.get(f"{kind}/{name}")
            if block is not None:
                whole[ranks.rank * rows : ranks.rank * rows + len(block)] = block
            found[f"{kind}/{name}"] = ranks.sum(whole)
    return found


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert sorted(first) == sorted(second)
    return max(float((first[n] - second[n]).norm() / second[n].norm().clamp(min=1e-12)) for n in second)


def case_resharded(ranks: Collectives, source: Path, **options) -> dict:
    """What another number of ranks saved after three steps, put together, and the next step from it."""
    full = load_file(source)
    model, zero = zero_model(ranks, **options)
    zero.weights.load(full.__getitem__)
    zero.optimizer.load_state(full.get)
    loaded = all(torch.equal(tensor, full[n]) for n, tensor in zero.full_tensors())
    model_2 = Model()
    replica = DataParallelOptimizer(model_2.named_parameters(), ranks, **ADAM)
    with torch.no_grad():
        for n, parameter in model_2.named_parameters():
            parameter.copy_(full[n])
    replica.load_state_tensors({n: full[n] for n in replica.state_tensors()})
    train_step(2, model_2, replica, directly, ranks, 2)
    train_step(2, model, zero.optimizer, zero.compute, ranks, 2)
    expected = {n: p.detach() for n, p in model_2.named_parameters()}
    return {"loaded": loaded, "distance": distance(dict(zero.full_tensors()), expected)}


def case_not_finite(ranks: Collectives, dtype: torch.dtype = torch.float32, **options) -> dict:
    """A step that one rank spoils, between two that are applied: as if it had not been."""
    model, zero = zero_model(ranks, Model().to(dtype), **options)
    other, without = zero_model(ranks, Model().to(dtype), **options)
    train_step(0, model, zero.optimizer, zero.compute, ranks, 2)
    train_step(0, other, without.optimizer, without.compute, ranks, 2)
    zero.optimizer.backward(zero.compute(model.sum_of_losses, share(0, 0, 1)[:1], True))
    spoilt = float("nan") if ranks.rank == 1 else 1.0
    zero.optimizer.backward(zero.compute(model.sum_of_losses, share(0, 0, 1)[:1], True) * spoilt, last=True)
    refused = zero.optimizer.step(RATE)
    unchanged = equal(zero, without)
    applied = train_step(1, model, zero.optimizer, zero.compute, ranks, 2).applied
    train_step(1, other, without.optimizer, without.compute, ranks, 2)
    return {"refused": not refused.applied, "unchanged": unchanged, "applied": applied, "next": equal(zero, without)}


def case_bfloat16(ranks: Collectives, **options) -> dict:
    """Steps too small for the last bit of a weight add up in the float32 copies."""
    start = Model().to(torch.bfloat16)
    model, zero = zero_model(ranks, start, **options)
    first = {n: t.clone() for n, t in zero.full_tensors()}
    before = copies(zero.optimizer.state_tensors())
    for step in range(2):
        for rows, use_extra in micro_batches(step, ranks, 2):
            zero.optimizer.backward(zero.compute(model.sum_of_losses, rows, use_extra))
        zero.optimizer.step(1e-5)
    after = zero.optimizer.state_tensors()
    masters = [n for n in after if n.startswith("master/")]
    moved = [float((after[n] - before[n]).abs().max()) for n in masters if "extra" not in n]
    kept = sum(int((first[n] == t).sum()) for n, t in zero.full_tensors()) / sum(t.numel() for t in first.values())
    return {
        "dtypes": sorted({str(t.dtype) for _, t in zero.full_tensors()} | {str(after[n].dtype) for n in masters}),
        "moved": [min(moved), max(moved)],
        "kept": kept,
    }


def case_frozen_narrow(ranks: Collectives, **options) -> dict:
    """Frozen bfloat16 weights beside float32 ones that are trained, as under adapters, against replicas of the same."""
    models = [Model(), Model()]
    for model in models:
        model.frozen.to(torch.bfloat16)
        model.frozen.forward = types.MethodType(_in_float32, model.frozen)
    model, zero = zero_model(ranks, models[0], **options)
    replica = DataParallelOptimizer(models[1].named_parameters(), ranks, **ADAM)
    norms = []
    for step in range(NUM_STEPS):
        found = train_step(step, model, zero.optimizer, zero.compute, ranks, 3)
        norms.append([found.gradient_norm, train_step(step, models[1], replica, directly, ranks, 3).gradient_norm])
    whole = {name: tensor.clone() for name, tensor in zero.full_tensors()}
    expected = {name: parameter.detach() for name, parameter in models[1].named_parameters()}
    trained = {name for name, _ in zero.full_tensors(trained=True)}
    return {
        "norms": norms,
        "frozen": str(whole["frozen.weight"].dtype),
        "same": torch.equal(whole["frozen.weight"], expected["frozen.weight"]),
        "distance": distance({n: whole[n] for n in trained}, {n: expected[n] for n in trained}),
        "untrained": sorted(set(whole) - trained),
    }


def _in_float32(layer: nn.Linear, inputs: Tensor) -> Tensor:
    return nn.functional.linear(inputs, layer.weight.float())


def case_bfloat16_close(ranks: Collectives, **options) -> dict:
    """Three steps from float32 copies against those of replicas with such copies."""
    model, zero = zero_model(ranks, Model().to(torch.bfloat16), **options)
    other = Model().to(torch.bfloat16)
    replica = DataParallelOptimizer(other.named_parameters(), ranks, **ADAM, master=True)
    for step in range(NUM_STEPS):
        train_step(step, model, zero.optimizer, zero.compute, ranks, 3)
        train_step(step, other, replica, directly, ranks, 3)
    first = {n: t.float() for n, t in zero.full_tensors()}
    return {"distance": distance(first, {n: p.detach().float() for n, p in other.named_parameters()})}


def case_float16(ranks: Collectives, **options) -> dict:
    """From a loss scale that overflows: whether steps were applied, and the scale."""
    model, zero = zero_model(ranks, Model().to(torch.float16), initial_scale_power=18, **options)
    applied = [train_step(step % 3, model, zero.optimizer, zero.compute, ranks, 2).applied for step in range(12)]
    return {"applied": applied, "scale": float(zero.optimizer.state_tensors()["loss_scale"][0])}


def case_steps_differ(ranks: Collectives, **options) -> dict:
    _, zero = zero_model(ranks, **options)
    full: dict[str, Tensor] = {}
    for name, parameter in Model().named_parameters():
        full |= {
            f"exp_avg/{name}": torch.zeros_like(parameter),
            f"exp_avg_sq/{name}": torch.zeros_like(parameter),
        }
        full[f"step/{name}"] = torch.tensor(5.0 if name == "extra.weight" else 3.0)
    caught = []
    for read in (full.get, {**full, "exp_avg/embedding.weight": torch.zeros(1)}.get):
        try:
            zero.optimizer.state.load(read)
        except CheckpointError as error:
            caught.append(error.problem.code)
    return {"codes": caught}


def all_cases(ranks: Collectives, out: Path, name: str, options: dict[str, Any]) -> dict[str, dict]:
    """What a stage is asked on two ranks."""
    cases = {
        "offload": case_zero(ranks, out, f"{name}_offload", cpu_offload=True, **options),
        "not_finite": case_not_finite(ranks, **options),
        "one": case_zero(ranks, out, f"{name}_one", num=1, **options),
        "unclipped": case_zero(ranks, out, f"{name}_unclipped", max_norm=0.0, **options),
        "recompute": case_zero(ranks, out, f"{name}_recompute", recompute=True, **options),
        "resumed_bf16": case_resumed(ranks, torch.bfloat16, **options),
        "resumed_offload": case_resumed(ranks, cpu_offload=True, **options),
        "not_finite_bf16": case_not_finite(ranks, torch.bfloat16, **options),
        "not_finite_offload": case_not_finite(ranks, cpu_offload=True, **options),
        "not_finite_bf16_offload": case_not_finite(ranks, torch.bfloat16, cpu_offload=True, **options),
        "float16": case_float16(ranks, **options),
        "float16_offload": case_float16(ranks, cpu_offload=True, **options),
        "resumed_float16": case_resumed(ranks, torch.float16, initial_scale_power=8, **options),
        "bf16": case_bfloat16(ranks, **options),
        "bf16_close": case_bfloat16_close(ranks, **options),
        "frozen_narrow": case_frozen_narrow(ranks, **options),
        "steps_differ": case_steps_differ(ranks, **options),
    }
    if options["stage"] > 1:
        cases["overlap"] = case_zero(ranks, out, f"{name}_overlap", overlap_comm=True, **options)
    return cases


def base_cases(ranks: Collectives, out: Path, name: str, options: dict[str, Any]) -> dict[str, dict]:
    """What a stage is asked on any number of ranks."""
    return {
        "steps": case_zero(ranks, out, name, **options),
        "resumed": case_resumed(ranks, **options),
        "from_fsdp": case_from_fsdp(ranks, **options),
    }


def main() -> None:
    """Arguments: the folder to write to, "all", "base" or "resharded", and a folder of what other ranks saved."""
    out, mode = Path(sys.argv[1]), sys.argv[2]
    ranks = start_process_group(ranks_from_environment(), CPU)
    accelerator = load_deepspeed(CPU).accelerator.get_accelerator()
    type(accelerator).is_fp16_supported = lambda self: True  # it is where speed does not matter
    results: dict[str, dict] = {}
    if mode != "resharded":
        results["replicated"] = case_replicated(ranks, out, "replicated")
        results["replicated_one"] = case_replicated(ranks, out, "replicated_one", num=1)
        results["replicated_unclipped"] = case_replicated(ranks, out, "replicated_unclipped", max_norm=0.0)
    for name, options in STAGES.items():
        cases: dict[str, dict] = {}
        if mode != "resharded":
            cases |= base_cases(ranks, out, name, options)
        gc.freeze()  # DeepSpeed collects what it can find several times for each engine
        if mode == "all":
            cases |= all_cases(ranks, out, name, options)
        if len(sys.argv) > 3:
            cases["resharded"] = case_resharded(ranks, Path(sys.argv[3]) / f"{name}_whole.safetensors", **options)
        results |= {f"{name}_{case}": found for case, found in cases.items()}
    if mode == "all":
        results["persistent"] = case_zero(ranks, out, "persistent", stage=3)
        results["persistent_resumed"] = case_resumed(ranks, stage=3)
    if ranks.world_size == 4:
        secondary: dict[str, Any] = {"stage": 3, "persistent_numel": 0, "hpz_size": 2}
        results["secondary"] = case_zero(ranks, out, "secondary", **secondary)
        results["secondary_resumed"] = case_resumed(ranks, **secondary)
    (out / f"rank_{ranks.rank}.json").write_text(json.dumps(results))
    stop_process_group()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
