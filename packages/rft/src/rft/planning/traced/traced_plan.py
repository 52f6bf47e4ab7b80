"""The traced step of a plan: its largest micro-batch from the settings, and a word on how it was traced."""

from __future__ import annotations

from typing import Any

import torch

from rft.planning.traced.stages import MicroBatchShape
from rft.planning.traced.step import StepToTrace, TracedStep, trace_step
from rft.planning.workload import Workload
from rft.process.launching import share_of
from rft.resolved import Resolved
from rft_dist.planning.memory_estimate import DecoderSizes, StepBytes, TrainingMemoryConfig
from rft_dist.planning.parallel_dims import ParallelDims
from rft_dist.strategies.autocast import of_device


def traced_step(
    resolved: Resolved[Any],
    workload: Workload,
    grid: ParallelDims,
    sizes: DecoderSizes,
    run: TrainingMemoryConfig,
    *,
    on_gpu: bool,
) -> tuple[StepBytes | None, list[str]]:
    """Trace the largest micro-batch of a rank; (None, why) where it cannot be, and the bound by formula stands.

    Args:
        resolved: the settings, whose model is a directory with a config.json.
        workload: of the command.
        grid: the ranks.
        sizes: widths of the model.
        run: the memory configuration of the same settings.
        on_gpu: whether the machines are known to have GPUs; else they have where this one has.
    """
    stage = workload.traced_stage()
    if stage is None:
        return None, []
    if grid.tp_size > 1:
        return None, ["activations and logits are a bound by formula: a step of a tensor group is not traced"]
    if run.layout.policy.expert_ranks > 1:
        return None, ["activations and logits are a bound by formula: a step of divided experts is not traced"]
    device = "cuda" if on_gpu or torch.cuda.is_available() else "cpu"
    units, unit_tokens = _micro_batch(run, resolved, workload, grid)
    samples, _ = share_of(resolved.values).of(grid.dp_size)
    is_float16 = resolved.values.get("fp16") or resolved.values.get("amp_dtype") == "fp16"
    half = torch.float16 if is_float16 else torch.bfloat16
    step = StepToTrace(
        stage=stage,
        settings=resolved.settings,
        values=resolved.values,
        shape=MicroBatchShape(units, unit_tokens, sizes.vocab),
        dtype=half if run.compute_bytes == 2 else torch.float32,
        autocast=half if run.autocast else None,
        device_type=device,
        num_layers=sizes.layers,
        several=samples > units,
        has_token_head=workload.has_token_head,
        sums_in_float32=run.master_copy,
    )
    try:
        found = trace_step(step)
    except Exception as error:  # noqa: BLE001  # whatever an architecture does to tensors without values
        why = str(error).strip().splitlines()
        return None, [
            "activations and logits are a bound by formula: a step of this model cannot be traced "
            f"({type(error).__name__}{': ' + why[0] if why else ''})"
        ]
    return _bytes(found, step), [_note(found, device)]


def autocasts_here() -> bool:
    """Return whether autocast computes in fewer bits on this machine, where no type is asked for."""
    return of_device(torch.device("cuda" if torch.cuda.is_available() else "cpu")).dtype is not None


def _micro_batch(
    run: TrainingMemoryConfig, resolved: Resolved[Any], workload: Workload, grid: ParallelDims
) -> tuple[int, int]:
    """(units of the largest micro-batch, tokens of each of them on one rank)."""
    samples, _ = share_of(resolved.values).of(grid.dp_size)
    packs = resolved.values.get("packing_samples") and resolved.values["max_tokens_per_micro_batch"]
    units = samples if packs else min(resolved.values["micro_train_batch_size"], samples)
    tokens = run.micro_tokens // grid.sp_size
    unit = run.unit_tokens // grid.sp_size
    # a cap leaves as many whole units as it has room for
    return max(min(units, tokens // unit), 1), unit


def _bytes(found: TracedStep, step: StepToTrace) -> StepBytes:
    shape = step.shape
    what = f"{shape.num_units:,} x {shape.unit_tokens:,} tokens, traced"
    return StepBytes(found.activations, found.logits, found.gradients, what)


def _note(found: TracedStep, device: str) -> str:
    layers = " and ".join(map(str, found.layers))
    how = f"with {layers} of its layers, and the line through both" if len(found.layers) > 1 else "with all its layers"
    machine = "on a GPU" if device == "cuda" else "on a CPU (with --gpu_memory or --gpus_per_node as on a GPU)"
    return f"the step was traced on tensors without values, {how}, as it runs {machine}"
