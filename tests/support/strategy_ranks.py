"""The program of one rank: the same optimizer step of GRPO under every strategy, from the same weights."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from rft_algos.algorithms.published import Grpo
from rft_core.keyed_random import integers, uniforms
from rft_core.packed_tokens import PackedTokens
from rft_dist.collectives import Collectives
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.settings import SequenceMode
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_dist.strategies.fsdp import FullyShardedModel, ShardedOptimizer
from rft_dist.strategies.process_groups import DataParallelRanks, TensorGroup
from rft_dist.strategies.sequence_parallel import SequenceGroup
from rft_dist.strategies.tensor_parallel import TensorParallelModel, TensorParallelOptimizer
from rft_dist.strategies.tensor_parallel_fsdp import TensorShardedOptimizer
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.policy.tensor_parallel_plan import apply_tensor_parallel, tensor_plan
from rft_models.testing.activation_bytes import held_for_backward
from rft_trainer.batches.units import MicroBatching
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.metrics.weight_change import ReplicatedWeights, WeightSample
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective
from support import family_ranks

torch.set_num_threads(1)
CPU = torch.device("cpu")
ADAM: dict[str, Any] = {"betas": (0.0, 0.95), "epsilon": 1e-8, "weight_decay": 0.1, "max_norm": 0.5}
"""With a first beta of 0, `exp_avg` is the clipped gradient itself."""
RECORD = Grpo(kl_place="loss", kl_coef=0.02, entropy_coef=0.01)
VOCABULARY = 48


@dataclass(frozen=True)
class Case:
    """A way to lie on the ranks, and to cut."""

    name: str
    fsdp: bool = False
    shard_size: int | None = None
    sp_size: int = 1
    sp_mode: SequenceMode = "auto"
    tp_size: int = 1
    zero_stage: int = 0
    cut: MicroBatching = MicroBatching(3, 0, False)  # noqa: RUF009


def cases(world_size: int, model: str) -> list[Case]:
    """What the number of ranks and the heads of the model allow; those of Llama do not divide."""
    even = model != "llama"
    one_by_one, packed = MicroBatching(1, 0, False), MicroBatching(2, 40, True)
    found = [
        Case("replicated"),
        Case("replicated one by one", cut=one_by_one),
        Case("replicated packed", cut=packed),
        Case("fsdp", fsdp=True),
        Case("fsdp one by one", fsdp=True, cut=one_by_one),
    ]
    if world_size > 1:
        found += [Case("sp 2", sp_size=2), Case("sp 2 fsdp", sp_size=2, fsdp=True, cut=packed)]
        other: SequenceMode = "ring" if even else "ulysses"  # than "auto" takes
        found.append(Case(f"sp 2 {other}", sp_size=2, sp_mode=other, cut=packed))
        if even:
            found += [Case("tp 2", tp_size=2), Case("tp 2 packed", tp_size=2, cut=packed)]
            found += [
                Case("tp 2 fsdp", tp_size=2, fsdp=True),
                Case("tp 2 fsdp packed", tp_size=2, fsdp=True, cut=packed),
            ]
    if world_size == 4:
        found += [Case("sp 4", sp_size=4), Case("hybrid", fsdp=True, shard_size=2)]
    return found


def samples() -> list[TrainingSample]:
    """Groups that share a prompt, of uneven lengths; more on some ranks than on others."""
    made = []
    for index in range(11):
        prompt = integers(index // 3, 4 + index % 3, 1, VOCABULARY).tolist()
        response = integers(100 + index, 9, 1, VOCABULARY).tolist()[: 1 + index % 9]
        behaviour = (-3.0 * uniforms([index], len(response))[0]).tolist()
        reference = [value - 0.1 for value in behaviour]
        made.append(
            TrainingSample(
                f"s{index}",
                (*prompt, *response),
                len(prompt),
                float(index % 5) - 2.0,
                behaviour_logprobs=tuple(behaviour),
                old_logprobs=tuple(behaviour),
                reference_logprobs=tuple(reference),
            )
        )
    return made


def groups() -> list[RolloutGroup]:
    """The same as rollouts, for the forward without gradient."""
    return [
        RolloutGroup(
            Prompt(sample.sample_id, sample.token_ids[: sample.prompt_length], "", None, "generated"),
            0,
            index,
            (
                Rollout(
                    prompt_id=sample.sample_id,
                    sample_index=0,
                    completion_ids=sample.token_ids[sample.prompt_length :],
                    behaviour_logprobs=sample.behaviour_logprobs,
                    log_kept_mass=(0.0,) * len(sample.behaviour_logprobs),
                    finish_reason="stop",
                    weight_version=0,
                    response_text="",
                    reward=0.0,
                    status=RewardStatus.OK,
                ),
            ),
        )
        for index, sample in enumerate(samples())
    ]


Weights = Callable[[], Iterable[tuple[str, Tensor]]]


def distributed(policy: CausalPolicy, case: Case, ranks: Collectives) -> tuple[Any, Weights, DataParallelRanks, Any]:
    """(optimizer, provider of whole weights, who shares samples, divided weights) of a policy as the case says."""
    if case.tp_size > 1:
        group = TensorGroup(ranks, case.tp_size, CPU)
        plan, cut = tensor_plan(policy, case.tp_size), list[TensorParallelModel]()
        apply_tensor_parallel(
            policy, lambda: cut.append(TensorParallelModel(policy.model, plan, group)), group, shares_head=True
        )
        if case.fsdp:
            spread = FullyShardedModel(policy.model, policy.layers, ranks, device=CPU, mesh=group.data_mesh)
            policy.wrap_forward(spread.compute)
            optimizer = TensorShardedOptimizer(policy.trainable_parameters(), group, of_heads=plan.of_heads, **ADAM)
            return optimizer, spread.full_tensors, DataParallelRanks(ranks, group), spread
        optimizer = TensorParallelOptimizer(policy.trainable_parameters(), group, of_heads=plan.of_heads, **ADAM)
        return optimizer, cut[0].full_tensors, DataParallelRanks(ranks, group), cut[0]
    sequence = SequenceGroup(ranks, case.sp_size)
    policy.enable_sequence_parallel(sequence, case.sp_mode)
    data = DataParallelRanks(ranks, sequence)
    if case.fsdp:
        spread = FullyShardedModel(policy.model, policy.layers, ranks, device=CPU, shard_size=case.shard_size)
        policy.wrap_forward(spread.compute)
        return ShardedOptimizer(policy.trainable_parameters(), ranks, **ADAM), spread.full_tensors, data, spread
    optimizer = DataParallelOptimizer(policy.trainable_parameters(), ranks, **ADAM)
    return optimizer, policy.named_parameters, data, None


def gradients_of(policy: CausalPolicy, optimizer: Any) -> dict[str, Tensor]:
    """The moments that are the gradients: whole ones, also of matrices in parts; blocks of FSDP as they are."""
    parameters = dict(policy.named_parameters())
    found: dict[str, Tensor] = {}
    for key, tensor in optimizer.state_tensors().items():
        kind, _, name = key.partition("/")
        if kind != "exp_avg":
            continue
        parameter = parameters[name]
        if isinstance(optimizer, TensorParallelOptimizer) and isinstance(parameter, DTensor):
            tensor = DTensor.from_local(tensor, parameter.device_mesh, parameter.placements).full_tensor()
        found[key] = tensor.contiguous()
    return found


def run(case: Case, model: Path, ranks: Collectives, out: Path) -> dict[str, Any]:
    """One step; gradients (by way of a moment) and weights into files."""
    policy = load_policy(model, tokenizer=object()).train()  # type: ignore[arg-type]
    optimizer, weights, data, divided = distributed(policy, case, ranks)
    collective_forward = case.fsdp or case.zero_stage > 0
    annotator = LogprobScorer(
        policy, data, max_sequences=2, max_tokens=0, temperature=0.9, collective_forward=collective_forward
    )
    scored = annotator(groups())
    updater = Updater(
        PolicyLoss(policy, PolicyObjective(RECORD), temperature=0.9),
        optimizer,
        data,
        micro_batching=case.cut,
        learning_rate=lambda update: 1e-2,
        collective_forward=collective_forward,
        # under the names of the decoder, as where it is divided: they decide which weights are looked at
        sample=WeightSample(divided or ReplicatedWeights(policy.model)),
    )
    totals = MetricTotals()
    outcome = updater(samples(), 0, totals)
    gradients = gradients_of(policy, optimizer)
    file = case.name.replace(" ", "_")
    save_file({name: t.clone() for name, t in gradients.items()}, out / f"gradients_{file}_{ranks.rank}.safetensors")
    save_file({name: t.detach().clone() for name, t in weights()}, out / f"weights_{file}_{ranks.rank}.safetensors")
    # over all ranks, as loops do: each may hold other blocks of the weights
    merged = totals.merged(ranks)
    return {"norm": outcome.gradient_norm, "metrics": merged, "scored": scored, "turns": outcome.num_micro_batches}


CONTEXT = 768


def held_bytes(model: Path, ranks: Collectives) -> dict[str, int]:
    """What a context that all ranks share leaves on this one for its backward pass, by how attention is shared."""
    token_ids = torch.arange(CONTEXT) % VOCABULARY
    positions, segments = torch.arange(CONTEXT), torch.zeros_like(token_ids)
    given = token_ids, positions, segments, torch.ones_like(token_ids, dtype=torch.bool)
    found: dict[str, int] = {}
    modes: tuple[SequenceMode, ...] = ("ulysses", "ring")
    for mode in modes:
        policy = load_policy(model, tokenizer=object()).train()  # type: ignore[arg-type]
        policy.enable_sequence_parallel(SequenceGroup(ranks, ranks.world_size), mode)
        known = [*policy.model.parameters(), *policy.model.buffers(), *given]
        loss, found[mode] = held_for_backward(
            lambda policy=policy: policy.token_logprobs(PackedTokens(*given))[0].sum(), known
        )
        loss.backward()
    return found


def main() -> None:
    out, models = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    ranks = start_process_group(ranks_from_environment(), CPU)
    found = {
        f"{model.name}/{case.name}": run(case, model, ranks, _made(out / model.name))
        for model in models
        for case in cases(ranks.world_size, model.name)
    }
    if ranks.world_size == 2:
        found["families"] = family_ranks.distances(ranks)
    found["held"] = {model.name: held_bytes(model, ranks) for model in models}
    (out / f"rank_{ranks.rank}.json").write_text(json.dumps(found))
    stop_process_group()
    sys.stderr.flush()
    os._exit(0)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    main()
