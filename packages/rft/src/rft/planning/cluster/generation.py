"""Seconds of a rollout in engines that hold their own copy of the weights, bound by the bandwidth of their memory."""

from __future__ import annotations

from dataclasses import dataclass

from rft.planning.cluster.equations import RankGroup, decode_step_bytes, decode_step_flops, forward_flops, sum_seconds
from rft.planning.cluster.hardware import Gpu
from rft.planning.cluster.workload import StepShape
from rft_dist.planning.memory_estimate import DecoderSizes, cache_bytes_of_token


@dataclass(frozen=True, slots=True)
class EngineFleet:
    """Engines of a cluster, all alike."""

    num_engines: int
    gpus: int
    """That share one engine."""
    bytes_of_gpu: float
    """Memory that an engine may take of each of its GPUs."""


@dataclass(frozen=True, slots=True)
class RolloutCost:
    """Rows and seconds of one rollout."""

    rows: int
    """Sequences that an engine decodes at once; 0 = it has no room for one."""
    cache_bytes: float
    """Keys and values of them at their end, on each GPU."""
    seconds: float


def engine_weight_bytes(sizes: DecoderSizes, shape: StepShape, weight_bytes: int, gpus: int) -> float:
    """P w / S: the engine's copy of the weights on each of its GPUs."""
    return sizes.parameters * (1 if shape.rounds_engine else weight_bytes) / gpus


def generation(
    fleet: EngineFleet, sizes: DecoderSizes, shape: StepShape, weight_bytes: int, gpu: Gpu, rate: float
) -> RolloutCost:
    """Return how an engine draws its share of the samples.

    Rows are drawn in rounds of as many as the cache holds at their full length. A step of a round takes the longer one
    of reading weights and cache and of the operations, and the sums over the engine's GPUs; a prompt is read once for
    all its samples.

    Args:
        fleet: the engines.
        sizes: widths of the model.
        shape: the samples.
        weight_bytes: of an element of weights and cache.
        gpu: its memory's bandwidth.
        rate: operations a second of a GPU.
    """
    room = fleet.bytes_of_gpu - engine_weight_bytes(sizes, shape, weight_bytes, fleet.gpus)
    of_row = shape.sample_tokens * cache_bytes_of_token(sizes, weight_bytes) / fleet.gpus
    prompts = -(-shape.num_prompts // fleet.num_engines)
    samples = prompts * shape.samples_a_prompt
    rows = min(shape.engine_rows, samples, int(max(room, 0) // of_row))
    if not rows:
        return RolloutCost(0, 0.0, float("inf"))
    rounds = -(-samples // rows)
    rows_of_round = samples / rounds
    matrix_bytes = 1 if shape.rounds_engine else weight_bytes
    # linear in the context, so that its mean stands for all steps
    context = shape.prompt_tokens + shape.response_tokens / 2
    read = decode_step_bytes(sizes, rows_of_round, context, weight_bytes, fleet.gpus)
    read -= decode_step_bytes(sizes, 0, 0, weight_bytes - matrix_bytes, fleet.gpus)
    flops = decode_step_flops(sizes, rows_of_round, context, fleet.gpus)
    sums = 2 * sizes.layers
    exchanged = sum_seconds(
        sums * rows_of_round * sizes.hidden * weight_bytes, RankGroup(fleet.gpus, fleet.gpus), pieces=sums
    )
    step = max(read / gpu.bandwidth.value, flops / rate) + exchanged
    prefill = prompts * forward_flops(sizes, shape.prompt_tokens) / (fleet.gpus * rate)
    return RolloutCost(rows, rows * of_row, prefill + rounds * shape.response_tokens * step)
