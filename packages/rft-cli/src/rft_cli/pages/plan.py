"""Page of `rft-train plan`: ranks, batches, images and memory of a run, as text and as one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from rft.planning.cluster.strategy_costs import ClusterPlan, StrategyCost
from rft.planning.fit_ladder import HEADROOM, Ladder
from rft.planning.largest_model import ModelFit
from rft.planning.predicted_speed import PredictedSpeed
from rft.planning.run_plan import PlanRequest, RunPlan
from rft_cli.pages.run_plan_ranks import grid_lines, share_line

if TYPE_CHECKING:  # its module imports torch, and a plan without images needs none
    from rft.planning.image_tokens import ImagePlan

_GIB = 2**30


def lines(plan: RunPlan) -> list[str]:
    """Return the plan as lines of text."""
    training, rollout = plan.training_bytes, plan.rollout_bytes
    rows = [f"{'ranks':<12} {line}" for line in grid_lines(plan.grid)]
    rows += [f"{'origin':<12} {name}: {origin}" for name, origin in plan.grid.origins.items()]
    rows += [f"{'batches':<12} {line}" for line in _batch_lines(plan)]
    rows += [f"{'images':<12} {line}" for line in (image_lines(plan.images) if plan.images else ())]
    rows.append(f"{'memory':<12} {plan.parameters:,} parameters, from config.json; of one rank, at most:")
    for term in plan.terms:
        where = "; in host memory" if term.on_host else ""
        part = ""
        if term.at_peak is not None and term.at_peak < term.num_bytes:
            part = f"; {term.at_peak / _GIB:.3f} GiB of it at the peak of the passes"
        rows.append(f"{'':<12} {term.name:<22} {term.num_bytes / _GIB:9.3f} GiB = {term.formula}{part}{where}")
    rows.append(f"{'':<12} {'while training':<22} {training / _GIB:9.3f} GiB")
    if plan.rollout is not None:
        rows.append(f"{'':<12} {'while generating':<22} {rollout / _GIB:9.3f} GiB")
    if host := plan.host_bytes:
        rows.append(f"{'':<12} {'in host memory':<22} {host / _GIB:9.3f} GiB (on a CPU it is the same memory)")
    if plan.gpu_memory is not None:
        rows += [f"{'to fit':<12} {line}" for line in (ladder_lines(plan.ladder) if plan.ladder else ())]
        left = plan.gpu_memory - max(training, rollout) / _GIB
        word = "are left" if left >= 0 else "are missing"
        rows.append(f"{'':<12} {abs(left):.1f} GiB of {plan.gpu_memory} {word}, before what the libraries take")
    rows += [f"{'speed':<12} {line}" for line in (speed_lines(plan.speed) if plan.speed else ())]
    return rows + [f"{'note':<12} {note}" for note in plan.notes]


def as_object(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as a JSON object."""
    grid = plan.grid
    return {
        "world_size": grid.world_size,
        "nodes": grid.num_nodes,
        "ranks_per_node": grid.ranks_per_node,
        "dp_size": grid.dp_size,
        "sp_size": grid.sp_size,
        "tp_size": grid.tp_size,
        "origins": dict(grid.origins),
        "ranks": [list(grid.coordinates(rank)) for rank in range(grid.world_size)],
        "batches": _batch_lines(plan),
        "parameters": plan.parameters,
        "memory": [asdict(term) for term in plan.terms],
        "training_bytes": plan.training_bytes,
        "rollout_bytes": plan.rollout_bytes,
        "host_bytes": plan.host_bytes,
        "gpu_memory": plan.gpu_memory,
        "images": asdict(plan.images) if plan.images else None,
        "ladder": {**asdict(plan.ladder), "fits": plan.ladder.fits} if plan.ladder else None,
        "speed": asdict(plan.speed) if plan.speed else None,
        "notes": plan.notes,
    }


def speed_lines(speed: PredictedSpeed) -> list[str]:
    """Return the predicted samples a minute with what they assume."""
    devices = "1 device" if speed.num_devices == 1 else f"{speed.num_devices:,} devices"
    return [
        f"predicted: {speed.samples_a_minute:,.1f} samples a minute of {speed.num_tokens:,} tokens, the longest "
        f"allowed ({speed.flops_a_sample / 1e12:,.2f} x 10^12 operations each)",
        f"with {speed.model_tflops:g} x 10^12 operations a second of each of {devices} (--model_tflops), and nothing "
        "beside forward and backward",
    ]


def fit_lines(family: str, request: PlanRequest, fits: Sequence[ModelFit]) -> list[str]:
    """Return what a card can train of a family, model by model."""
    memory = request.numbers["gpu_memory"]
    best = next((fit for fit in reversed(fits) if fit.fits), None)
    largest = f"the largest that fits is {best.name}" if best else "none fits"
    rows = [
        f"{'predicted':<12} {family} on {memory} GiB a GPU, by formula, {HEADROOM:.0%} of it left free: {largest}",
        *(f"{'':<12} {_fit_line(fit)}" for fit in fits),
    ]
    if fits[-1].fits:
        rows.append(f"{'':<12} no larger one of the family is known here")
    return rows


def cluster_object(plan: ClusterPlan) -> dict[str, Any]:
    """Return the plan of a cluster as a JSON object; what no time exists for is null."""
    chosen = plan.chosen
    costs = [_cost_object(cost) for cost in plan.costs]
    return asdict(plan) | {
        "cluster": str(plan.cluster),
        "costs": costs,
        "chosen": plan.costs.index(chosen) if chosen is not None else None,
    }


def _cost_object(cost: StrategyCost) -> dict[str, Any]:
    seconds = {name: value if isfinite(value) else None for name, value in cost.seconds.items()}
    return {**asdict(cost), "seconds": seconds, "fits": cost.fits}


def cluster_lines(plan: ClusterPlan) -> list[str]:
    """Return the strategies on a cluster as lines of text: what each costs, or why it does not run."""
    shape, chosen, source = plan.shape, plan.chosen, plan.rate_source.partition(":")[0]
    rows = [
        f"{'predicted':<12} {plan.model}, {plan.parameters:,} parameters, on {plan.cluster}: {shape.num_prompts:,} "
        f"prompts x {shape.samples_a_prompt} samples of {shape.prompt_tokens:,} + {shape.response_tokens:,} tokens, "
        f"{shape.forwards} x log-probs, {shape.updates} x update",
        f"{'rates':<12} {plan.model_tflops:,.0f} x 10^12 operations a second of a GPU ({source}); "
        "memory and network as their datasheets say (docs/scaling.md)",
    ]
    placement = ""
    for cost in plan.costs:
        if cost.placement != placement:
            placement = cost.placement
            rows += ["", f"{placement}: GiB, 10^15 operations and 10^9 bytes of a rank, seconds", _COST_HEADER]
        rows.append(_cost_line(cost))
    answer = f"{chosen.name}, {chosen.placement}: {chosen.flags}" if chosen is not None else "none fits"
    return [*rows, "", f"{'chosen':<12} {answer}", *(f"{'note':<12} {note}" for note in plan.notes)]


_COST_COLUMNS = (
    ("training", 9, "GiB"),
    ("generating", 11, "GiB"),
    ("PFLOP", 8, ""),
    ("GB moved", 9, ""),
    ("rollout", 8, "s"),
    ("log-probs", 10, "s"),
    ("update", 8, "s"),
    ("network", 8, "s"),
    ("weights", 8, "s"),
    ("step", 8, "s"),
)
"""Name, width, unit."""
_COST_HEADER = f"  {'':<26} ranks" + "".join(f" {name:>{width}}" for name, width, _ in _COST_COLUMNS)


def _cost_line(cost: StrategyCost) -> str:
    head = f"  {cost.name:<26} {cost.num_ranks:>5}"
    if not cost.fits:
        return f"{head}  {cost.problem}"
    training = max(cost.memory["training"], cost.memory["loading"])
    numbers = [training / _GIB, cost.memory["generating"] / _GIB, cost.flops / 1e15, cost.network_bytes / 1e9]
    numbers += [cost.seconds[name] for name, _, unit in _COST_COLUMNS if unit == "s"]
    cells = zip(numbers, _COST_COLUMNS, strict=True)
    return head + "".join(f" {number:>{width},.1f}" for number, (_, width, _) in cells)


def _fit_line(fit: ModelFit) -> str:
    size = f"{fit.name:<6} {fit.parameters:>14,} parameters {fit.peak_bytes / _GIB:9.1f} GiB"
    if not fit.fits:
        return f"{size}  does not fit" + (f", not with {fit.flags}" if fit.flags else "")
    return f"{size}  " + (f"with {fit.flags}" if fit.flags else "as it is")


def ladder_lines(ladder: Ladder) -> list[str]:
    """Return a line for each rung with its bytes, and the flags to write."""
    limit = ladder.limit_bytes / _GIB
    lines = [
        f"{limit:.1f} GiB, the GPU without {HEADROOM:.0%}; the batch and the mathematics of a step stay as they are"
    ]
    for rung in ladder.rungs:
        verdict = rung.cost if rung.kept else "left out: the peak is elsewhere"
        lines.append(f"{rung.training_bytes / _GIB:9.3f} GiB with {rung.flags} ({verdict})")
    if not ladder.flags:
        lines.append("none of them lowers the peak")
    elif ladder.fits:
        lines.append(f"write {ladder.flags}")
    else:
        lines.append(
            f"all together, {ladder.flags}, leave {ladder.training_bytes / _GIB:.3f} GiB: more ranks that share the "
            "weights out (--fsdp, --zero_stage), or a smaller model or length"
        )
    return lines


def _batch_lines(plan: RunPlan) -> list[str]:
    """Return a rank's share of an optimizer step, and of a rollout where there is one."""
    lines, share = [share_line(plan.share, plan.grid.dp_size)], plan.rollout
    if share is not None:
        lines.append(
            f"rollout_batch_size {share.num_prompts:,} prompts / {plan.grid.world_size:,} = {share.prompts_a_rank:,} "
            f"a rank x {share.samples_a_prompt:,} samples = {share.samples_a_rank:,}, scored in "
            f"{share.num_forwards:,} forwards of {share.rows_a_forward:,}"
        )
    return lines


def image_lines(images: ImagePlan) -> list[str]:
    """Return what the images of the rows come to in tokens, the rows that are left out, and a remedy."""
    few, many = images.images_a_row
    low, high = images.pixels
    least, mean, largest = images.tokens_a_row
    lines = [
        f"{images.num_sampled:,} of {images.num_rows:,} rows looked at, headers alone: {images.num_images:,} images, "
        f"{_span(few, many)} a row, {_span(low, high)} pixels each",
        f"{_span(least, largest)} tokens of images a row, mean {mean:,.1f}; longest with its text {images.longest:,} "
        f"({images.longest_row}), {images.limit_flag.removeprefix('--')} = {images.limit:,}",
    ]
    if images.too_long:
        about = f", about {round(images.too_long * images.num_rows / images.num_sampled):,} of all"
        lines.append(
            f"left out, longer than {images.limit:,} tokens: {images.too_long:,} of these rows"
            f"{about if images.num_rows > images.num_sampled else ''}; none with {images.remedy}"
        )
    if images.too_many:
        lines.append(
            f"refused: {images.too_many:,} of these rows have more images than limit_mm_image_per_prompt allows; "
            f"--limit_mm_image_per_prompt {images.most_images}"
        )
    if images.unreadable:
        lines.append(
            f"refused: {images.unreadable:,} of these rows have an image of a shape or header that the model's "
            f"processor does not take, the first {images.first_unreadable}"
        )
    return lines


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
