"""Plan of a step on a cluster: the cost of every strategy, where its engines are, and the fastest that fits.

The memory of a rank is that of `rft.planning.run_plan.plan_run`, by formula; what travels, `traffic`; the rollout,
`generation`. Everything is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rft.decoder_sizes import model_sizes
from rft.hub.run_settings import with_local_models
from rft.planning.cluster.equations import host_copy_seconds, optimizer_seconds
from rft.planning.cluster.generation import EngineFleet, RolloutCost, engine_weight_bytes, generation
from rft.planning.cluster.hardware import TRAINING, Cluster
from rft.planning.cluster.traffic import (
    Candidate,
    Widths,
    exposed_seconds,
    logprob_exchanges,
    update_exchanges,
    weight_exchange,
)
from rft.planning.cluster.workload import StepShape, beside_cluster, step_shape
from rft.planning.fit_ladder import HEADROOM
from rft.planning.run_plan import PlanRequest, RunPlan, plan_run
from rft.planning.workload import Workload
from rft.resolved import Resolved
from rft_core.errors import RftError
from rft_dist.planning.memory_estimate import GIB, DecoderSizes, MemoryTerm
from rft_dist.strategies.registry import FSDP, refusals
from rft_engine.registry import AUTO, ENGINES
from rft_models.files.divisibility import refuse_uneven_model

_ENGINE = next(name for name, kind in ENGINES.items() if kind.is_preferred_on_gpu)
_NO_STRATEGY: Mapping[str, Any] = {
    FSDP.setting: False,
    "shard_size": None,
    "meta_init": False,
    "zero_stage": 0,
    "zpg": 1,
    "overlap_comm": False,
    "sp_size": 1,
    "tp_size": 1,
    "ep_size": 1,
    # the cluster says the ranks
    "nproc": 0,
    # what the engine takes is found here
    "engine_mem_util": None,
    "engine_replicas": 1,
    "engine_tp_size": 1,
    "max_staleness": 0,
}
_SMALLER = "--use_mp_opt --gradient_checkpointing --fused_linear_logprob --micro_train_batch_size 1"
TIE = 0.01
"""Share of a step below which two predictions are taken as equal."""
_GROUPS = (2, 4, 8)
"""Sizes of tensor groups and of engines, which stay within a machine."""


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """One strategy with its engines: bytes, operations and seconds of a step, of one GPU."""

    name: str
    flags: str
    placement: str
    """Where the engines are: on the GPUs of the ranks, or on others."""
    num_ranks: int
    memory: Mapping[str, int]
    """Bytes of a rank's GPU: weights, gradients, optimizer, activations, and at most at once; of the engine's."""
    limit_bytes: int
    flops: float
    """Of a rank's log-probabilities and updates."""
    network_bytes: float
    """That a rank receives."""
    network_seconds: float
    """Of these exchanges, also of those that layers compute beside."""
    seconds: Mapping[str, float]
    """rollout, log-probs, update, network (what of it is waited for), weights (their way to the engine), step."""
    engine_rows: int
    tokens_a_second: float
    """Of a GPU of the cluster, over the step."""
    problem: str = ""
    """Why it does not run; empty = it fits."""

    @property
    def fits(self) -> bool:
        """Return whether it fits."""
        return not self.problem


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """All strategies on a cluster, and the one that is chosen."""

    cluster: Cluster
    model: str
    parameters: int
    shape: StepShape
    model_tflops: float
    """10^12 operations a second of a GPU in training."""
    rate_source: str
    costs: list[StrategyCost]
    notes: list[str]

    @property
    def chosen(self) -> StrategyCost | None:
        """Return the fastest that fits; None where none does.

        Of those within `TIE` of it: not DeepSpeed, which has copies and buffers of its own, and that with the shortest
        exchanges, since what is hidden in the prediction may show.
        """
        return fastest(self.costs)


@dataclass(frozen=True, slots=True)
class _Case:
    """Cluster, run and model that all strategies of a plan share."""

    cluster: Cluster
    resolved: Resolved[Any]
    workload: Workload
    sizes: DecoderSizes
    shape: StepShape
    rate: float

    @property
    def limit(self) -> int:
        return int(self.cluster.gpu.memory.value * GIB * (1 - HEADROOM))

    @property
    def widths(self) -> Widths:
        values = self.resolved.values
        narrow = bool(values.get("use_mp_opt") or values.get("fp16"))
        weight = 2 if narrow or values["bf16"] else 4
        return Widths(weight, 4 if narrow else weight)


def plan_cluster(
    cluster: Cluster, model: str, resolved: Resolved[Any], workload: Workload, model_tflops: float = 0.0
) -> ClusterPlan:
    """Plan a step of a command on a cluster.

    Args:
        cluster: its GPUs.
        model: its name on the page.
        resolved: settings of the run; those of strategy and engine placement are gone through.
        workload: of the command.
        model_tflops: 10^12 operations a second of a GPU in training, as a run measured them; 0 = the published rate.

    Raises:
        OptionsError: a setting that the equations do not count.
        DataError: no config.json, or one without the widths.
    """
    shape = step_shape(resolved)
    _refuse_engine(resolved.values["engine_type"])
    resolved = with_local_models(resolved, weights=False).with_values({**_NO_STRATEGY, "engine_type": _ENGINE})
    sizes, notes = model_sizes(resolved.values["pretrain"])
    if sizes.num_experts:
        raise beside_cluster("a mixture of experts", "the exchanges of experts are not counted")
    case = _Case(cluster, resolved, workload, sizes, shape, model_tflops * 1e12 or TRAINING.value)
    costs = [_best(list(rows)) for rows in _colocated(case)]
    costs += [_best(rows) for rows in _separate(case) if rows]
    if not any(cost.fits for cost in costs) and all("activations" in cost.problem for cost in costs if cost.memory):
        notes = [*notes, f"activations are those of the settings: {_SMALLER} makes them smaller"]
    source = "--model_tflops" if model_tflops else f"{TRAINING.kind}, {TRAINING.source}"
    return ClusterPlan(cluster, model, sizes.parameters, shape, case.rate / 1e12, source, costs, notes)


def _colocated(case: _Case) -> Iterator[Iterator[StrategyCost]]:
    """Yield the rows of each strategy with an engine on each rank's GPU, that sleeps while the policy trains."""
    machines, ranks = case.cluster.num_machines, case.cluster.gpus_of_machine
    for candidates in _candidates(machines, ranks):
        yield (_cost(case, candidate, 0) for candidate in candidates)


def _separate(case: _Case) -> Iterator[list[StrategyCost]]:
    """Yield the rows of each size of engines that have GPUs of their own and draw while the policy trains."""
    machines, gpus = case.cluster.num_machines, case.cluster.gpus_of_machine
    for size in (1, *_GROUPS):
        ranks = gpus // (1 + size)
        if ranks:
            rows = [_cost(case, each, size) for group in _candidates(machines, ranks) for each in group]
            yield rows


def _candidates(machines: int, ranks: int) -> list[list[Candidate]]:
    """Return the strategies on so many ranks a machine; those of a list differ in the size of a tensor group."""
    mine = (machines, ranks)
    sizes = [size for size in _GROUPS if ranks % size == 0]
    rows = [
        [Candidate("replicas", "replicas", *mine)],
        [Candidate("ZeRO 2", "zero2", *mine, changes={"zero_stage": 2, "overlap_comm": True})],
        [Candidate("ZeRO 3", "zero3", *mine, changes={"zero_stage": 3, "overlap_comm": True})],
        [Candidate("FSDP2", "sharded", *mine, changes={FSDP.setting: True, "meta_init": True})],
    ]
    if machines > 1 and ranks > 1:
        shared = [count for count in range(1, machines) if machines % count == 0]
        hybrids = [{FSDP.setting: True, "shard_size": ranks * count, "meta_init": True} for count in shared]
        rows.append([Candidate("hybrid FSDP2", "hybrid", *mine, changes=changes) for changes in hybrids])
    if sizes:
        rows.append([Candidate("tensor parallel", "tensor", *mine, size, {"tp_size": size}) for size in sizes])
    if machines * ranks > 1 and sizes:
        rows.append(
            [
                Candidate(
                    "tensor parallel, FSDP2", "tensor_sharded", *mine, size, {"tp_size": size, FSDP.setting: True}
                )
                for size in sizes
                if size < machines * ranks
            ]
        )
    return [row for row in rows if row]


def _cost(case: _Case, candidate: Candidate, engine_gpus: int) -> StrategyCost:
    """Return the cost of a strategy; `engine_gpus`: of an engine beside each rank, 0 = it is on the rank's GPU."""
    values = {**_NO_STRATEGY, "engine_type": _ENGINE, **candidate.changes}
    refusal = next(refusals({**case.resolved.values, **values}), None)
    if refusal is not None:
        return _unplanned(case, candidate, engine_gpus, refusal.why)
    # without gpu_memory: what fits is judged here, and no ladder of smaller micro-batches is gone down
    request = PlanRequest({"world_size": candidate.num_ranks, "gpus_per_node": candidate.ranks_of_machine})
    try:
        plan = plan_run(request, case.resolved.with_values(values), case.workload)
        if engine_gpus > 1:
            refuse_uneven_model(case.resolved.values["pretrain"], engine_gpus)
    except RftError as error:
        return _unplanned(case, candidate, engine_gpus, error.problem.what)
    return _planned(case, candidate, engine_gpus, plan)


def _planned(case: _Case, candidate: Candidate, engine_gpus: int, plan: RunPlan) -> StrategyCost:
    sizes, shape, widths, gpu = case.sizes, case.shape, case.widths, case.cluster.gpu
    fleet = EngineFleet(
        candidate.num_ranks, max(engine_gpus, 1), case.limit - (0 if engine_gpus else plan.rollout_bytes)
    )
    draws = generation(fleet, sizes, shape, widths.weight, gpu, case.rate)
    scored, updated = _compute_seconds(case, candidate)
    scoring, updates = (each(candidate, sizes, shape, widths) for each in (logprob_exchanges, update_exchanges))
    network = exposed_seconds(scoring, scored) + exposed_seconds(updates, updated)
    updated += shape.updates * optimizer_seconds(_stepped_on(candidate, sizes), gpu.bandwidth.value)
    sync = weight_exchange(candidate, sizes, widths)
    copied = engine_weight_bytes(sizes, shape, widths.weight, 1)
    weights = sync.seconds + host_copy_seconds(copied)
    training = scored + updated + network
    step = max(draws.seconds, training) + weights if engine_gpus else draws.seconds + training + weights
    named = {"rollout": draws.seconds, "log-probs": scored, "update": updated, "network": network, "weights": weights}
    found = _memory(candidate, plan, case, draws, fleet)
    return StrategyCost(
        name=_name(candidate),
        flags=_flags(candidate, case, fleet, engine_gpus),
        placement=_placement(engine_gpus),
        num_ranks=candidate.num_ranks,
        memory=found,
        limit_bytes=case.limit,
        flops=(shape.forward_flops(sizes) + shape.training_flops(sizes)) / candidate.num_ranks,
        network_bytes=sum(each.num_bytes for each in (*scoring, *updates, sync)),
        network_seconds=sum(each.seconds for each in (*scoring, *updates)),
        seconds={**named, "step": step},
        engine_rows=draws.rows,
        tokens_a_second=shape.num_tokens / step / case.cluster.num_gpus,
        problem=_problem(found, case.limit, draws),
    )


def _compute_seconds(case: _Case, candidate: Candidate) -> tuple[float, float]:
    """(log-probs, updates) of the rank with the most samples: operations over the rate of a GPU."""
    shape, groups = case.shape, candidate.dp_size
    of_update = shape.num_samples * shape.epochs / shape.updates
    # a batch that does not divide leaves ranks waiting for those with one sample more
    scored = -(-shape.num_samples // groups) * groups / shape.num_samples
    updated = -(-of_update // groups) * groups / of_update
    rate = candidate.num_ranks * case.rate
    forward, training = shape.forward_flops(case.sizes), shape.training_flops(case.sizes)
    return scored * forward / rate, updated * training / rate


def _stepped_on(candidate: Candidate, sizes: DecoderSizes) -> float:
    """Parameters of which a rank has the moments."""
    if candidate.kind in ("replicas", "tensor"):
        return sizes.parameters / candidate.tp_size
    group = candidate.everyone if candidate.kind in ("zero2", "zero3") else candidate.shards
    return sizes.parameters / candidate.tp_size / group.size


_KINDS = ("weights", "gradients", "optimizer", "activations")
_PARTS = {
    "parameters": "weights",
    "gathered weights": "weights",
    "reference model": "weights",
    "gradients": "gradients",
    "gradient exchange": "gradients",
    "Adam moments": "optimizer",
    "Muon momenta": "optimizer",
    "master copy": "optimizer",
    "moving average": "optimizer",
}


def _memory(candidate: Candidate, plan: RunPlan, case: _Case, draws: RolloutCost, fleet: EngineFleet) -> dict[str, int]:
    found: dict[str, int] = dict.fromkeys(_KINDS, 0)
    for term in plan.terms:
        if not term.on_host:
            found[_PARTS.get(term.name.removeprefix("critic "), "activations")] += term.num_bytes
    weights = engine_weight_bytes(case.sizes, case.shape, case.widths.weight, fleet.gpus)
    resident = int(case.limit - fleet.bytes_of_gpu)
    return found | {
        "training": plan.training_bytes,
        "loading": _loading(candidate, plan.terms),
        "engine": int(weights + draws.cache_bytes),
        "generating": resident + int(weights + draws.cache_bytes),
    }


def _loading(candidate: Candidate, terms: Sequence[MemoryTerm]) -> int:
    """Bytes of the weights as a rank loads them: all of them, unless each reads its own shards."""
    own = next(term.num_bytes for term in terms if term.name == "parameters")
    if not candidate.loads_whole:
        return own
    return own * candidate.tp_size * (1 if candidate.kind == "tensor" else candidate.shards.size)


def _problem(memory: Mapping[str, int], limit: int, draws: RolloutCost) -> str:
    """Say what does not fit; empty = everything does."""
    room = f"{limit / GIB:.0f} GiB"
    if memory["training"] > limit:
        part = max(_KINDS, key=lambda name: memory[name])
        return f"does not fit: {memory['training'] / GIB:,.0f} of {room} in training, most of it {part}"
    if memory["loading"] > limit:
        return f"does not fit: a rank loads the whole model, {memory['loading'] / GIB:,.0f} of {room}"
    if not draws.rows:
        return f"does not fit: the engine's weights, {memory['engine'] / GIB:,.0f} GiB, leave no room for a sequence"
    return ""


def _unplanned(case: _Case, candidate: Candidate, engine_gpus: int, why: str) -> StrategyCost:
    """Return the row of a strategy that the start refuses."""
    return StrategyCost(
        name=_name(candidate),
        flags="",
        placement=_placement(engine_gpus),
        num_ranks=candidate.num_ranks,
        memory={},
        limit_bytes=case.limit,
        flops=0.0,
        network_bytes=0.0,
        network_seconds=0.0,
        seconds={},
        engine_rows=0,
        tokens_a_second=0.0,
        problem=f"refused: {why}",
    )


def fastest(costs: Sequence[StrategyCost]) -> StrategyCost | None:
    """Return the row that is chosen, as of `ClusterPlan.chosen`."""
    fitting = [cost for cost in costs if cost.fits]
    if not fitting:
        return None
    least = min(cost.seconds["step"] for cost in fitting)
    near = [cost for cost in fitting if cost.seconds["step"] <= (1 + TIE) * least]
    return min(near, key=lambda cost: (cost.name.startswith("ZeRO"), cost.network_seconds))


def _best(rows: Sequence[StrategyCost]) -> StrategyCost:
    """Return the fastest that fits, else the one with the least memory, else the first."""
    found = fastest(rows)
    if found is not None:
        return found
    planned = [row for row in rows if row.memory]
    return min(planned, key=lambda row: max(row.memory["training"], row.memory["loading"])) if planned else rows[0]


def _flags(candidate: Candidate, case: _Case, fleet: EngineFleet, engine_gpus: int) -> str:
    """Return the flags of strategy and engine, beside those of the command."""
    values = dict(candidate.changes)
    values["nproc"] = candidate.ranks_of_machine
    values["engine_type"] = _ENGINE
    share = fleet.bytes_of_gpu / (case.cluster.gpu.memory.value * GIB)
    values["engine_mem_util"] = int(100 * max(share, 0.01)) / 100
    if engine_gpus:
        values |= {"engine_tp_size": engine_gpus, "engine_replicas": 1, "max_staleness": 1}
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in values.items())


def _name(candidate: Candidate) -> str:
    size = candidate.changes.get("shard_size") or (candidate.tp_size if candidate.tp_size > 1 else 0)
    return f"{candidate.name} ({size})" if size else candidate.name


def _placement(engine_gpus: int) -> str:
    return f"engines of {engine_gpus} on GPUs of their own" if engine_gpus else "engines on the ranks' GPUs"


def _refuse_engine(engine_type: str) -> None:
    if engine_type not in (AUTO, _ENGINE):
        raise beside_cluster(f"engine_type = {engine_type}", f"the copy that {_ENGINE} holds is counted")
