"""`rft-train plan`: the ranks, batches and memory of a run on machines that are not here; starts nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from rft.decoder_sizes import IMAGES_NOT_COUNTED, max_positions, model_sizes
from rft.planning.lora_memory import adapter_weights
from rft.process.launching import share_of
from rft.resolved import Resolved
from rft.reward_names import memory_notes
from rft_cli.config.resolve import resolve
from rft_core.errors import OptionsError
from rft_dist.planning.memory_estimate import (
    GIB,
    SHARDINGS,
    MemoryTerm,
    Sharding,
    TrainingMemoryConfig,
    estimate,
    host_peak,
    peak_bytes,
)
from rft_dist.planning.parallel_dims import BatchShare, ParallelDims, SourcedNumber, Wanted, resolve_grid
from rft_models.files.divisibility import refuse_uneven_model

if TYPE_CHECKING:
    from rft.planning.image_tokens import ImagePlan

USAGE = """usage: rft-train plan [rl|sft] [--world_size N] [--nodes N] [--gpus_per_node N] [OPTIONS]

Say what every rank of the command would do and hold, without a GPU, a process group or the weights: the grid of
ranks, each rank's share of a batch, and its memory by formula. Options are those of the command; rl is meant
without a word. Numbers that contradict one another are refused as at the real start. With images_key the headers of
some images are read, for what they come to in tokens.

  --world_size N      ranks in all
  --nodes N           machines
  --gpus_per_node N   GPUs of each machine, a rank each
  --gpu_memory N      GiB of each GPU: say what of it is left
  --sharding KIND     replicated (as trained now), or by division: zero1, zero2, zero3, fsdp
  --json              one JSON object"""

_NUMBERS = ("world_size", "nodes", "gpus_per_node", "gpu_memory")
COMMANDS = ("rl", "sft")


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line, sorted into the plan's own options and those of the command."""

    command: str
    numbers: Mapping[str, int]
    sharding: Sharding | None
    as_json: bool
    words: list[str]
    """Options of the command."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a run: grid, batches, memory terms, notes."""

    grid: ParallelDims
    shares: list[str]
    terms: list[MemoryTerm]
    parameters: int
    notes: list[str]
    gpu_memory: int | None
    images: ImagePlan | None = None
    """Of the training rows; None without images, or where the data are not on this machine."""


def run(argv: list[str]) -> int:
    """Print the plan; a run that could not start is refused with the error of the start."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    asked = sort_words(argv)
    resolved = resolve(asked.command, asked.words)
    plan = plan_of(asked, resolved)
    print(json.dumps(as_object(plan)) if asked.as_json else "\n".join(lines(plan)))
    return 0


def sort_words(argv: Sequence[str]) -> Asked:
    """The plan's own options, wherever they stand, and the rest."""
    words = list(argv)
    command = words.pop(0) if words and not words[0].startswith("-") else "rl"
    if command not in COMMANDS:
        raise _refused("plan.unknown_command", f"plan cannot plan {command!r}", f"it plans {' and '.join(COMMANDS)}")
    numbers: dict[str, int] = {}
    sharding, as_json, rest = "", False, list[str]()
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if word == "--json":
            as_json = True
        elif word.startswith("--") and name in (*_NUMBERS, "sharding"):
            value = value if equals else (words.pop(0) if words else "")
            if name == "sharding":
                sharding = value
            elif value.isdecimal():
                numbers[name] = int(value)
            else:
                raise _refused("option.bad_value", f"--{name} = {value!r}", "it counts: an integer is needed")
        else:
            rest.append(word)
    if sharding and sharding not in SHARDINGS:
        raise _refused("option.bad_value", f"--sharding = {sharding!r}", f"it is one of {', '.join(SHARDINGS)}")
    return Asked(command, numbers, sharding or None, as_json, rest)


def plan_of(asked: Asked, resolved: Resolved[Any]) -> Plan:
    """Grid, batches and memory; raises what the start would raise."""
    values = resolved.values
    share = share_of(values)
    grid = resolve_grid(wanted_of(asked, values, resolved.origins, os.environ))
    notes = list(resolved.notes)
    sizes, size_notes = model_sizes(values["pretrain"])
    refuse_uneven_model(values["pretrain"], grid.tp_size)
    training, more = training_of(asked, resolved, grid)
    shares = [share.line(grid.dp_size), *_rollout_lines(asked, resolved, grid)]
    terms = estimate(sizes, training)
    gpu_memory = asked.numbers.get("gpu_memory")
    plan = Plan(grid, shares, terms, sizes.parameters, [*notes, *size_notes, *more], gpu_memory)
    return _with_images(plan, asked, resolved, training)


def _with_images(plan: Plan, asked: Asked, resolved: Resolved[Any], training: TrainingMemoryConfig) -> Plan:
    """Add the tokens of images and the memory of a vision tower to the plan, where there are any."""
    if not resolved.values.get("images_key") and IMAGES_NOT_COUNTED not in plan.notes:
        return plan
    from rft.build.reward_checks import require_image_rewards
    from rft.planning.vision_memory import image_parts

    if asked.command == "rl":
        require_image_rewards(resolved.settings)
    positions = max_positions(resolved.values["pretrain"])
    parts = image_parts(asked.command, resolved.settings, resolved.values, training, positions)
    notes = [note for note in plan.notes if note != IMAGES_NOT_COUNTED or not parts.parameters]
    return replace(
        plan,
        terms=[*plan.terms, *parts.terms],
        parameters=plan.parameters + parts.parameters,
        notes=[*notes, *parts.notes],
        images=parts.images,
    )


def wanted_of(
    asked: Asked, values: Mapping[str, Any], origins: Mapping[str, Any], environment: Mapping[str, str]
) -> Wanted:
    """The numbers of flags; where there are none those of NUM_NODES and GPUS_PER_NODE."""
    flags = {name: SourcedNumber(value, f"--{name}") for name, value in asked.numbers.items()}

    def variable(name: str) -> SourcedNumber | None:
        text = environment.get(name, "")
        return SourcedNumber(int(text), f"{name} (the environment)") if text.isdecimal() else None

    nproc = SourcedNumber(values["nproc"], f"nproc: {origins['nproc']}") if values["nproc"] else None
    per_node = flags.get("gpus_per_node") or variable("GPUS_PER_NODE")
    parallel = {
        name: SourcedNumber(values[name], f"{name}: {origins[name]}")
        for name in ("sp_size", "tp_size")
        if values.get(name)
    }
    return Wanted(
        ranks=flags.get("world_size"),
        nodes=flags.get("nodes") or variable("NUM_NODES"),
        per_node=nproc or per_node,
        devices=per_node,
        share=share_of(values),
        launcher="plan",
        **parallel,
    )


def training_of(asked: Asked, resolved: Resolved[Any], grid: ParallelDims) -> tuple[TrainingMemoryConfig, list[str]]:
    """Return the memory configuration of the settings, and notes on what they leave open."""
    values, notes = resolved.values, list[str]()
    longest = longest_tokens(asked, values, notes)
    cap = values["max_tokens_per_micro_batch"]
    samples, _ = share_of(values).of(grid.dp_size)
    tokens = min(values["micro_train_batch_size"], samples) * longest
    sharding = asked.sharding or _sharding(values)
    if asked.sharding not in (None, "replicated"):
        notes.append(f"{asked.sharding}: what its ranks share out is divided among them; nothing was measured")
    needs_reference, needs_critic, rows = False, False, 0
    if asked.command == "rl":
        from rft.build.algorithm import algorithm_record

        notes += memory_notes(values)
        record = algorithm_record(resolved.settings)
        needs_reference, needs_critic = record.needs_reference, record.advantage.needs_values
        prompts = -(-values["rollout_batch_size"] // grid.dp_size)
        rows = min(values["engine_max_rows"], prompts * values["n_samples_per_prompt"])
        if values["engine_type"] == "vllm":
            rows = 0
            notes.append("vllm holds its own copy of the weights and its cache within --engine_mem_util of the GPU")
    adapters, more = adapter_weights(values, model_sizes(values["pretrain"])[0])
    notes += more
    if adapters and needs_reference:
        notes.append("the reference is the policy with its adapters disabled, and takes no memory")
    return TrainingMemoryConfig(
        dp_size=grid.dp_size,
        sp_size=grid.sp_size,
        tp_size=grid.tp_size,
        sharding=sharding,
        shard_size=values.get("shard_size"),
        **_precision(values, sharding),
        average=bool(values.get("enable_ema")),
        host_moments=bool(values.get("adam_offload") or values.get("fsdp_cpu_offload")),
        host_weights=bool(values.get("fsdp_cpu_offload")),
        micro_tokens=max(min(tokens, cap) if cap else tokens, longest),
        head_rows=values["chunk_size"] if values["fused_linear_logprob"] else None,
        recomputes=values["gradient_checkpointing"] and values["gradient_checkpointing_mode"] == "full",
        recompute_every=values["gradient_checkpointing_every"],
        adapter_weights=adapters,
        reference=needs_reference and not adapters,
        critic=needs_critic,
        cache_rows=rows,
        cache_tokens=longest,
    ), notes


def longest_tokens(asked: Asked, values: Mapping[str, Any], notes: list[str]) -> int:
    """Tokens of the longest sample that the settings allow; the data may stay below."""
    positions = max_positions(values["pretrain"])
    if asked.command == "rl":
        allowed = values["prompt_max_len"] + values["generate_max_len"]
        allowed = min(allowed, values["max_len"]) if values["max_len"] else allowed
    else:
        allowed = values["max_len"] or positions or 0
    if positions and allowed > positions:
        notes.append(f"{allowed:,} tokens are allowed and the model places {positions:,}: samples must stay below")
        return positions
    return allowed


def _sharding(values: Mapping[str, Any]) -> Sharding:
    """Return the sharding that the settings select; "replicated" where they select none."""
    if values.get("fsdp"):
        return "fsdp"
    stage = values.get("zero_stage") or 0
    return cast("Sharding", f"zero{stage}") if stage in (1, 2, 3) else "replicated"


def _precision(values: Mapping[str, Any], sharding: Sharding) -> dict[str, Any]:
    """Bytes of a weight, and where float32 is stepped on: blocks of FSDP are float32, other weights have copies."""
    rounds = bool(values.get("use_mp_opt") or values.get("fp16"))
    if rounds and sharding == "fsdp":
        return {"weight_bytes": 4, "narrow_compute": True}
    return {"weight_bytes": 2 if rounds or values["bf16"] else 4, "master_copy": rounds}


def _rollout_lines(asked: Asked, resolved: Resolved[Any], grid: ParallelDims) -> list[str]:
    """Return the plan's lines on a rollout's distribution by prompts; refuses batches that the start refuses."""
    if asked.command != "rl":
        return []
    from rft.build.algorithm import algorithm_record
    from rft_trainer.batches.batch_plan import plan_batches

    values = resolved.values
    names = ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size", "micro_train_batch_size")
    names += ("micro_rollout_batch_size", "max_epochs", "num_episodes")
    groups = algorithm_record(resolved.settings).advantage.compares_groups
    numbers = {name: int(values[name]) for name in names}
    plan_batches(values["rollout_batch_size"], **numbers, world_size=grid.dp_size, group_estimator=groups)
    prompts = BatchShare("rollout_batch_size", values["rollout_batch_size"], values["rollout_batch_size"])
    share, _ = prompts.of(grid.world_size)  # every rank generates, also those that train on the same samples
    samples = share * values["n_samples_per_prompt"]
    scored = -(-values["rollout_batch_size"] * values["n_samples_per_prompt"] // grid.dp_size)
    forwards = -(-scored // values["micro_rollout_batch_size"])
    return [
        f"rollout_batch_size {values['rollout_batch_size']:,} prompts / {grid.world_size:,} = {share:,} a rank x "
        f"{values['n_samples_per_prompt']:,} samples = {samples:,}, scored in {forwards:,} forwards of "
        f"{values['micro_rollout_batch_size']:,}"
    ]


def lines(plan: Plan) -> list[str]:
    """Return the plan as lines of text."""
    training, rollout = peak_bytes(plan.terms)
    rows = [f"{'ranks':<12} {line}" for line in plan.grid.lines()]
    rows += [f"{'origin':<12} {name}: {origin}" for name, origin in plan.grid.origins.items()]
    rows += [f"{'batches':<12} {line}" for line in plan.shares]
    rows += [f"{'images':<12} {line}" for line in (plan.images.lines() if plan.images else ())]
    rows.append(f"{'memory':<12} {plan.parameters:,} parameters, from config.json; of one rank, at most:")
    rows += [f"{'':<12} {term.line()}" for term in plan.terms]
    rows.append(f"{'':<12} {'while training':<22} {training / GIB:9.3f} GiB")
    rows.append(f"{'':<12} {'while generating':<22} {rollout / GIB:9.3f} GiB")
    if host := host_peak(plan.terms):
        rows.append(f"{'':<12} {'in host memory':<22} {host / GIB:9.3f} GiB (on a CPU it is the same memory)")
    if plan.gpu_memory is not None:
        left = plan.gpu_memory - max(training, rollout) / GIB
        word = "are left" if left >= 0 else "are missing"
        rows.append(f"{'':<12} {abs(left):.1f} GiB of {plan.gpu_memory} {word}, before what the libraries take")
    return rows + [f"{'note':<12} {note}" for note in plan.notes]


def as_object(plan: Plan) -> dict[str, Any]:
    """Return the plan as a JSON object."""
    training, rollout = peak_bytes(plan.terms)
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
        "batches": plan.shares,
        "parameters": plan.parameters,
        "memory": [asdict(term) for term in plan.terms],
        "training_bytes": training,
        "rollout_bytes": rollout,
        "host_bytes": host_peak(plan.terms),
        "images": asdict(plan.images) if plan.images else None,
        "notes": plan.notes,
    }


def _refused(code: str, what: str, why: str) -> OptionsError:
    return OptionsError(code=code, what=what, where="command line", why=why, do="rft-train plan --help")
