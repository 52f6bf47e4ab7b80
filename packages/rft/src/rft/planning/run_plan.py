"""Plan of a run on machines that are not here: the grid of ranks, each rank's share of a batch, and its memory.

Neither weights nor a process group are needed, and torch only where a step is traced or rows hold images.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rft.decoder_sizes import IMAGES_NOT_COUNTED, max_positions, model_sizes
from rft.hub.run_settings import with_local_models
from rft.planning.engine_memory import engine_parts, sleeps
from rft.planning.fit_ladder import Ladder, fit_ladder
from rft.planning.lora_memory import adapter_weights
from rft.planning.predicted_speed import PredictedSpeed, predicted_speed
from rft.planning.workload import RolloutShare, Workload
from rft.process.launching import group_sizes, share_of
from rft.resolved import Resolved
from rft_dist.planning.memory_estimate import (
    DecoderSizes,
    MemoryTerm,
    StepBytes,
    TrainingMemoryConfig,
    checkpoint_copy,
    estimate,
    host_peak,
    peak_bytes,
)
from rft_dist.planning.parallel_dims import (
    EXPERTS,
    BatchShare,
    ParallelDims,
    RequestedDims,
    SourcedNumber,
    refuse_uneven_group,
    resolve_grid,
)
from rft_dist.planning.run_layout import REPLICATED, Sharding
from rft_dist.strategies.registry import SHARDINGS, run_layout, strategy_settings
from rft_models.files.divisibility import refuse_uneven_experts_of, refuse_uneven_model

if TYPE_CHECKING:
    from rft.planning.image_tokens import ImagePlan


SHARDING_NAMES: tuple[str, ...] = tuple(SHARDINGS)
"""The words for a sharding that is planned in place of the settings' own."""
_OF_GPUS = {"gpu_memory", "gpus_per_node"}
"""Numbers that say that the machines have GPUs."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The machines that a run is planned for."""

    numbers: Mapping[str, int]
    """Any of world_size, nodes, gpus_per_node and gpu_memory (GiB)."""
    sharding: str = ""
    """One of `SHARDING_NAMES`, in place of what the settings select; empty = as they do."""
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where a number was written, of those that are no flag's."""
    fixed: frozenset[str] = frozenset()
    """Settings that stay as they are where the step does not fit."""
    traced: bool = False
    """Whether a step is traced, for what it holds at its peak, which imports torch; else it is bounded by formula."""
    model_tflops: float = 0.0
    """10^12 operations a second of one device in training, as a run measured them; 0 = not known."""
    reads_rows: bool = True
    """Whether rows with images are read for the features of their images; else what depends on these is left out."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Plan of a run: grid, batches, memory terms, notes."""

    grid: ParallelDims
    share: BatchShare
    """Of an optimizer step."""
    rollout: RolloutShare | None
    """None of a supervised run."""
    terms: list[MemoryTerm]
    parameters: int
    notes: list[str]
    gpu_memory: int | None
    """GiB of each GPU, where it was given, or of each rank (`memory_limit_gb`)."""
    images: ImagePlan | None = None
    """Of the training rows; None without images, or where the data are not on this machine."""
    ladder: Ladder | None = None
    """Settings with which training fits the memory of a GPU; None where it fits, or its memory was not given."""
    speed: PredictedSpeed | None = None
    """Samples a minute; None where no rate was given, or where the run does more than train."""

    @property
    def training_bytes(self) -> int:
        """Memory of one rank while it trains, at most."""
        return peak_bytes(self.terms)[0]

    @property
    def rollout_bytes(self) -> int:
        """Memory of one rank while it generates, at most."""
        return peak_bytes(self.terms)[1]

    @property
    def host_bytes(self) -> int:
        """Memory of the host for one rank, beside that of its device."""
        return host_peak(self.terms)


def plan_run(request: PlanRequest, resolved: Resolved[Any], workload: Workload) -> RunPlan:
    """Plan grid, batches and memory of a command with this workload, and what makes it fit where it does not.

    Raises:
        OptionsError: what the start would raise for numbers that contradict one another.
        DataError: no config.json, or one without the widths.
    """
    resolved = with_local_models(resolved, weights=False)
    plan = _plan(request, resolved, workload)
    if plan.gpu_memory is None:
        return plan

    def bytes_with(changes: Mapping[str, Any]) -> int:
        return _plan(request, resolved.with_values(changes), workload).training_bytes

    ladder = fit_ladder(
        resolved.values,
        plan.training_bytes,
        plan.gpu_memory,
        bytes_with,
        has_token_head=workload.has_token_head,
        fixed=request.fixed,
    )
    return replace(plan, ladder=ladder)


def _plan(request: PlanRequest, resolved: Resolved[Any], workload: Workload) -> RunPlan:
    values = resolved.values
    grid = resolve_grid(_requested(request, resolved, os.environ))
    sizes, size_notes = model_sizes(values["pretrain"])
    if not workload.has_token_head:
        # an output matrix that is the embedding too takes no memory of its own
        sizes = replace(sizes, tied=True)
    refuse_uneven_model(values["pretrain"], grid.tp_size)
    refuse_uneven_experts_of(values["pretrain"], values["ep_size"])
    refuse_uneven_group(values["ep_size"], grid.world_size, **EXPERTS)
    training, more = _training(request, resolved, grid, workload)
    memory = request.numbers.get("gpu_memory") or values.get("memory_limit_gb") or None
    engine = engine_parts(values, sizes, training, memory)
    step, about = _traced(request, resolved, workload, grid, sizes, training)
    terms = estimate(sizes, training) if step is None else estimate(sizes, training, step)
    if values.get("async_save"):
        terms.append(checkpoint_copy(terms, with_optimizer=not values["save_model_only"]))
    rollout = workload.rollout(resolved, grid)
    speed, unknown = _speed(request, workload, grid, sizes, training, samples_only=rollout is None)
    plan = RunPlan(
        grid=grid,
        share=share_of(values),
        rollout=rollout,
        terms=[*terms, *engine.terms],
        parameters=sizes.parameters,
        notes=[*resolved.notes, *size_notes, *more, *engine.notes, *about, *unknown],
        gpu_memory=memory,
        speed=speed,
    )
    return _with_images(plan, workload, resolved, training, reads_rows=request.reads_rows)


def _speed(
    request: PlanRequest,
    workload: Workload,
    grid: ParallelDims,
    sizes: DecoderSizes,
    training: TrainingMemoryConfig,
    *,
    samples_only: bool,
) -> tuple[PredictedSpeed | None, list[str]]:
    """Return the samples a minute where a rate is given and nothing but training takes time; else a note why not."""
    if not request.model_tflops:
        return None, []
    if not samples_only:
        return None, ["no samples a minute: sampling and scoring take time that no formula gives"]
    speed = predicted_speed(
        sizes,
        num_tokens=training.cache_tokens,
        model_tflops=request.model_tflops,
        num_devices=grid.world_size,
        adapter_weights=training.adapter_weights,
        has_token_head=workload.has_token_head,
    )
    return speed, []


def _with_images(
    plan: RunPlan, workload: Workload, resolved: Resolved[Any], training: TrainingMemoryConfig, *, reads_rows: bool
) -> RunPlan:
    """Add the tokens of images and the memory of a vision tower to the plan, where there are any."""
    if not resolved.values.get("images_key") and IMAGES_NOT_COUNTED not in plan.notes:
        return plan
    from rft.planning.vision_memory import image_parts

    workload.require_image_support(resolved.settings)
    positions = max_positions(resolved.values["pretrain"])
    parts = image_parts(workload, resolved.settings, resolved.values, training, positions, reads_rows=reads_rows)
    notes = [note for note in plan.notes if note != IMAGES_NOT_COUNTED or not parts.parameters]
    return replace(
        plan,
        terms=[*plan.terms, *parts.terms],
        parameters=plan.parameters + parts.parameters,
        notes=[*notes, *parts.notes],
        images=parts.images,
    )


def _traced(
    request: PlanRequest,
    resolved: Resolved[Any],
    workload: Workload,
    grid: ParallelDims,
    sizes: DecoderSizes,
    training: TrainingMemoryConfig,
) -> tuple[StepBytes | None, list[str]]:
    """Return the bytes of a traced step, or None, and a note on how the step was traced or why it was not."""
    if not request.traced:
        return None, []
    # torch is not imported for a plan by formula
    from rft.planning.traced.traced_plan import traced_step

    return traced_step(resolved, workload, grid, sizes, training, on_gpu=bool({*request.numbers} & _OF_GPUS))


def _requested(request: PlanRequest, resolved: Resolved[Any], environment: Mapping[str, str]) -> RequestedDims:
    """The numbers of flags; where there are none those of NUM_NODES and GPUS_PER_NODE."""
    nproc_size, nproc_origin = resolved.values["nproc"], resolved.origins["nproc"]
    flags = {
        name: SourcedNumber(value, request.sources.get(name, f"--{name}")) for name, value in request.numbers.items()
    }

    def variable(name: str) -> SourcedNumber | None:
        text = environment.get(name, "")
        return SourcedNumber(int(text), f"{name} (the environment)") if text.isdecimal() else None

    nproc = SourcedNumber(nproc_size, f"nproc: {nproc_origin}") if nproc_size else None
    per_node = flags.get("gpus_per_node") or variable("GPUS_PER_NODE")
    sp_size, tp_size = group_sizes(resolved)
    return RequestedDims(
        ranks=flags.get("world_size"),
        nodes=flags.get("nodes") or variable("NUM_NODES"),
        per_node=nproc or per_node,
        devices=per_node,
        sp_size=sp_size,
        tp_size=tp_size,
        share=share_of(resolved.values),
        launcher="plan",
    )


def _training(
    request: PlanRequest, resolved: Resolved[Any], grid: ParallelDims, workload: Workload
) -> tuple[TrainingMemoryConfig, list[str]]:
    """Return the memory configuration of the settings, and notes on what they leave open."""
    values, notes = resolved.values, list[str]()
    longest = _longest_tokens(workload, values, notes)
    samples, _ = share_of(values).of(grid.dp_size)
    unit = longest * workload.samples_a_unit(resolved.settings)
    tokens = min(values["micro_train_batch_size"], samples) * unit
    planned = SHARDINGS[request.sharding] if request.sharding else None
    layout = run_layout(strategy_settings(values), grid, planned)
    if planned is not None and layout.policy != REPLICATED:
        notes.append(f"{request.sharding}: what its ranks share out is divided among them; nothing was measured")
    extra = workload.extra_memory(resolved, grid)
    notes += extra.notes
    adapters, more = adapter_weights(values, model_sizes(values["pretrain"])[0])
    notes += more
    if adapters and extra.reference:
        notes.append("the reference is the policy with its adapters disabled, and takes no memory")
    return TrainingMemoryConfig(
        layout=layout,
        **_precision(values, layout.policy),
        autocast=_autocasts(request, values, notes),
        muon=values.get("optimizer") == "muon",
        average=bool(values.get("enable_ema")),
        host_moments=bool(values.get("adam_offload") or values.get("fsdp_cpu_offload")),
        host_weights=bool(values.get("fsdp_cpu_offload")),
        # no cap cuts a unit, so the longest one has to fit
        micro_tokens=max(_capped(tokens, samples * unit, values), unit),
        unit_tokens=unit,
        head_rows=values["chunk_size"] if values.get("fused_linear_logprob") else None,
        recomputes=values["gradient_checkpointing"] and values["gradient_checkpointing_mode"] == "full",
        recompute_every=values["gradient_checkpointing_every"],
        adapter_weights=adapters,
        reference=extra.reference and not adapters,
        critic=extra.critic,
        cache_rows=extra.cache_rows,
        cache_tokens=longest,
        cache_stays=not sleeps(values),
    ), notes


def _capped(tokens: int, of_rank: int, values: Mapping[str, Any]) -> int:
    """Tokens of a micro-batch of this many sequences; filled up to the cap with packing, but not above the rank's."""
    cap = values["max_tokens_per_micro_batch"]
    if cap and values.get("packing_samples"):
        return min(of_rank, cap)
    return min(tokens, cap) if cap else tokens


def _longest_tokens(workload: Workload, values: Mapping[str, Any], notes: list[str]) -> int:
    """Tokens of the longest sample that the settings allow; the data may stay below."""
    positions = max_positions(values["pretrain"])
    allowed = workload.longest_sample(values, positions)
    if positions and allowed > positions:
        notes.append(
            f"{allowed:,} tokens are allowed and the model has {positions:,} positions: samples must not exceed them"
        )
        return positions
    return allowed


def _autocasts(request: PlanRequest, values: Mapping[str, Any], notes: list[str]) -> bool:
    """Return whether products are computed in two bytes; a note says where that depends on the machine."""
    if not values.get("amp"):
        return False
    if values["amp_dtype"] != "auto" or {*request.numbers} & _OF_GPUS:
        return True
    if not request.traced:
        notes.append("amp: counted in float32, as without a GPU and without bfloat16 of the CPU (--amp_dtype bf16)")
        return False
    # torch is not imported for a plan by formula
    from rft.planning.traced.traced_plan import autocasts_here

    return autocasts_here()


def _precision(values: Mapping[str, Any], sharding: Sharding) -> dict[str, Any]:
    """Bytes of a weight, and where float32 is stepped on: the weights themselves, or copies of them."""
    rounds = bool(values.get("use_mp_opt") or values.get("fp16"))
    if rounds and sharding.float32_weights:
        return {"weight_bytes": 4, "narrow_compute": True}
    return {"weight_bytes": 2 if rounds or values["bf16"] else 4, "master_copy": rounds}
