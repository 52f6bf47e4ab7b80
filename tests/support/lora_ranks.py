"""The program of one rank: three steps of adapters under every strategy, and the third again from what was saved."""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rft.build.lora import adapt
from rft.parallel.parallelize import ParallelModel, parallelize, trainable_policy
from rft.parallel.policy_weights import engine_adapters, engine_weights
from rft.parallel.shardable import ShardablePolicy
from rft.process.machine import Machine
from rft_core.packed_tokens import PackedTokens
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.settings import AdamSettings, StrategySettings
from rft_models.lora import files
from rft_models.lora.adapters import BaseModelView
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.settings import AdapterKind, AdapterSettings, ModelSettings

torch.set_num_threads(1)
ADAM = AdamSettings(adam_epsilon=1e-6, l2=0.1, max_norm=0.5)
ROWS, LENGTH, RATE, SEED = 4, 9, 1e-2, 7


@dataclass(frozen=True)
class Case:
    """A way to lie on the ranks, and the kind of adapter."""

    strategy: dict[str, Any] = field(default_factory=dict)
    kind: AdapterKind = "lora"
    model: dict[str, Any] = field(default_factory=dict)


ZERO_3 = {"zero_stage": 3, "zpg": 2, "overlap_comm": True}
CASES: dict[str, Case] = {
    "replicas": Case(),
    "replicas dora": Case(kind="dora"),
    "replicas bf16": Case(model={"bf16": True}),
    "fsdp from files": Case({"fsdp": True, "meta_init": True}),
    "fsdp from files dora": Case({"fsdp": True, "meta_init": True}, kind="dora"),
    "fsdp bf16": Case({"fsdp": True}, model={"bf16": True}),
    "parts": Case({"tp_size": 2}),
    "parts in blocks": Case({"tp_size": 2, "fsdp": True}, model={"gradient_checkpointing": True}),
    "zero 1": Case({"zero_stage": 1, "adam_offload": True}),
    "zero 1 bf16": Case({"zero_stage": 1}, model={"bf16": True}),
    "zero 2": Case({"zero_stage": 2, "overlap_comm": True}, model={"gradient_checkpointing": True}),
    "zero 2 dora": Case({"zero_stage": 2, "adam_offload": True}, kind="dora"),
    "zero 3": Case(ZERO_3, model={"gradient_checkpointing": True}),
    "zero 3 dora": Case({"zero_stage": 3, "adam_offload": True}, kind="dora"),
    "zero 3 bf16": Case({"zero_stage": 3}, model={"bf16": True}),
}


def lay_out(source: Path, machine: Machine, case: Case, saved: Path | None = None) -> ParallelModel[CausalPolicy]:
    """A policy with adapters on the ranks; `saved`: their values."""
    model, strategy = ModelSettings(pretrain=str(source), **case.model), StrategySettings(**case.strategy)
    settings = AdapterSettings(lora_rank=3, lora_type=case.kind)
    tokenizer: Any = object()
    policy = trainable_policy(model, strategy, source, machine, tokenizer, settings)
    adapt(policy, settings, None, base=source, seed=SEED)
    if saved is not None:
        assert policy.adapters is not None
        files.load(policy.adapters, saved)
    return parallelize(ShardablePolicy(policy), strategy, ADAM, machine, None)


def row(number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = torch.randint(0, 12, (LENGTH,), generator=torch.Generator().manual_seed(number))
    return tokens, torch.arange(LENGTH), torch.zeros_like(tokens), torch.ones(LENGTH, dtype=torch.bool)


def step(spread: ParallelModel[CausalPolicy], number: int) -> float:
    """Of four rows, shared out over the ranks that do not compute together."""
    mine = list(range(ROWS))[spread.data.rank :: spread.data.world_size]
    for place in mine:
        logprobs_T, _ = spread.model.token_logprobs(PackedTokens(*row(ROWS * number + place)))
        spread.optimizer.backward(-logprobs_T.sum() / 40, last=place == mine[-1])
    return float(spread.optimizer.step(RATE).gradient_norm)


def adapters_of(spread: ParallelModel[CausalPolicy]) -> dict[str, Tensor]:
    """Whole, under the names of files."""
    adapters = spread.model.adapters
    assert adapters is not None
    alone = engine_adapters(spread) or adapters.named_parameters
    return {name: tensor.detach().clone() for name, tensor in adapters.tensors(alone()).items()}


def served(spread: ParallelModel[CausalPolicy]) -> dict[str, Tensor]:
    """What an engine gets."""
    given = engine_weights(spread) or spread.model.merged_parameters
    return {name: tensor.detach().clone() for name, tensor in given()}


def run(source: Path, machine: Machine, case: Case, out: Path, name: str) -> dict[str, Any]:
    spread, rank = lay_out(source, machine, case), machine.ranks.rank
    policy = spread.model
    norms = [step(spread, number) for number in range(2)]
    before = adapters_of(spread)
    folder = out / f"{name}_{rank}"
    assert policy.adapters is not None
    files.save(policy.adapters, folder, before)
    state = {key: tensor.clone() for key, tensor in spread.optimizer.state_tensors().items()}
    reference_T, _ = BaseModelView(policy).token_logprobs(PackedTokens(*row(99)))
    norms.append(step(spread, 2))
    after, whole = adapters_of(spread), served(spread)
    save_file(after, out / f"{name}_adapters_{rank}.safetensors")
    save_file({n: t.contiguous() for n, t in whole.items()}, out / f"{name}_served_{rank}.safetensors")
    del spread
    gc.collect()
    again = lay_out(source, machine, case, folder)
    again.optimizer.load_state_tensors(state)
    repeated = step(again, 2) == norms[-1]
    resumed = adapters_of(again)
    return {
        "norms": norms,
        "reference": reference_T.tolist(),
        "stepped": sorted({key.partition("/")[2] for key in state if key.startswith("exp_avg/")}),
        "resumed": repeated and all(torch.equal(after[n], resumed[n]) for n in after),
        "dtypes": sorted({str(tensor.dtype) for tensor in after.values()}),
    }


def main() -> None:
    """Arguments: the folder to write to, the model, and the cases; none = all."""
    out, source, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(CASES)
    info = ranks_from_environment()
    machine = Machine("cpu", info, start_process_group(info, torch.device("cpu")))
    results = {name: run(source, machine, CASES[name], out, name.replace(" ", "_")) for name in names}
    tokenizer: Any = object()
    with torch.no_grad():
        plain = {
            "": load_policy(source, tokenizer=tokenizer),
            " bf16": load_policy(source, tokenizer=tokenizer, dtype=torch.bfloat16),
        }
        expected = {
            f"loaded{end}": policy.token_logprobs(PackedTokens(*row(99)))[0].tolist() for end, policy in plain.items()
        }
    (out / f"rank_{info.rank}.json").write_text(json.dumps(results | expected))
    stop_process_group()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
