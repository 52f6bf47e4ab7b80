"""Memory of a run at its start, by formula: what can never fit is refused before weights are loaded, the rest is told.

Refused is only what no size of a micro-batch changes: weights, gradients and the optimizer's state, of policy, critic
and reference. A bound of activations and logits may be above what a step takes, so that it is a note.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rft.planning.fit_ladder import HEADROOM
from rft.planning.run_plan import PlanRequest, RunPlan, plan_run
from rft.planning.workload import DPO, RL, RM, SFT, Workload
from rft.process.machine import Machine
from rft.process.placement import ranks_on_this_machine
from rft.resolved import Resolved
from rft_core.errors import PreflightError, RftError
from rft_dist.planning.memory_estimate import GIB, MemoryTerm
from rft_dist.strategies.registry import smaller_shares

_ALWAYS = {"parameters", "adapters", "reference model", "tower parameters", "tower of the reference"}
_OF_THE_UPDATE = {
    *("gradients", "Adam moments", "Muon momenta", "master copy", "moving average"),
    *("tower gradients", "tower moments"),
}
_MEMORY, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that ranks of a run share: that of one GPU, or of this machine."""

    name: str
    total: int
    """Bytes."""
    free: int
    """Bytes that nobody holds now."""
    num_ranks: int
    """Ranks that share it."""
    of_host: bool
    holds_all: bool = False
    """Whether it holds what the device of a rank would hold too, as on a CPU."""

    def terms(self, terms: Sequence[MemoryTerm], values: Mapping[str, Any]) -> list[MemoryTerm]:
        """Return the parts of a rank's memory that are in it from the start to the end, the largest first."""
        names = _ALWAYS if _freezes(values) else _ALWAYS | _OF_THE_UPDATE
        own = [term for term in terms if self.holds_all or term.on_host == self.of_host]
        sure = [term for term in own if term.name.removeprefix("critic ") in names]
        return sorted(sure, key=lambda term: -term.num_bytes)

    def need(self, terms: Sequence[MemoryTerm], values: Mapping[str, Any]) -> int:
        """Return the bytes that all of its ranks hold from the start to the end, at least."""
        return self.num_ranks * sum(term.num_bytes for term in self.terms(terms, values))


@dataclass(frozen=True, slots=True)
class StartPlan:
    """The plan that a command makes at its start: `(resolved, machine) -> resolved` with what a person should know."""

    workload: Workload

    def __call__(self, resolved: Resolved[Any], machine: Machine) -> Resolved[Any]:
        """Return the settings as they are, with a note where memory may not suffice.

        Raises:
            PreflightError: what no micro-batch changes is more than there is.
        """
        return planned(resolved, self.workload, machine.ranks.world_size, rooms_of(machine))


SFT_START, DPO_START, RM_START, RL_START = StartPlan(SFT), StartPlan(DPO), StartPlan(RM), StartPlan(RL)
"""Of each stage."""


def planned(resolved: Resolved[Any], workload: Workload, world_size: int, rooms: Sequence[Room]) -> Resolved[Any]:
    """Compare the plan of a run with the memory that there is; settings as of `StartPlan`."""
    if not rooms:
        return resolved
    request = _request(world_size, rooms)
    plan = _plan_or_none(request, resolved, workload)
    if plan is None:
        return resolved
    for room in rooms:
        if room.need(plan.terms, resolved.values) > room.total:
            raise _no_room(resolved, plan, room, _remedy(resolved, workload, world_size, rooms))
    notes = [*_taken(resolved, plan, rooms), *_may_not_fit(plan, sees_images=bool(resolved.values.get("images_key")))]
    return replace(resolved, notes=(*resolved.notes, *notes)) if notes else resolved


def rooms_of(machine: Machine) -> list[Room]:
    """Return the memory that this rank is in: that of its GPU, and that of this machine."""
    ranks_here = ranks_on_this_machine(machine)
    device = torch.device(machine.device)
    host = _host(ranks_here, holds_all=device.type != "cuda")
    rooms = [host] if host is not None else []
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        sharing = max(1, math.ceil(ranks_here / torch.cuda.device_count()))
        name = f"GPU {device.index or 0} ({torch.cuda.get_device_name(device)})"
        rooms.insert(0, Room(name, total, free, sharing, of_host=False))
    return rooms


def _host(ranks_here: int, *, holds_all: bool) -> Room | None:
    """Return the memory of this machine with its swap, or of its control group; None where it is not told."""
    if not _MEMORY.is_file():
        return None
    rows = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
    total, swap, free = (1024 * int(rows[name].split()[0]) for name in ("MemTotal", "SwapTotal", "MemAvailable"))
    limit = _GROUP.read_text().strip() if _GROUP.is_file() else ""
    total = min(total + swap, int(limit)) if limit.isdecimal() else total + swap
    return Room("this machine", total, min(free + swap, total), ranks_here, of_host=True, holds_all=holds_all)


def _freezes(values: Mapping[str, Any]) -> bool:
    """Return whether a part of the weights is not trained, so that they have fewer gradients than are planned."""
    return bool(values.get("freeze_prefix")) or values.get("train_only_tokens_from", -1) >= 0


def _request(world_size: int, rooms: Sequence[Room]) -> PlanRequest:
    of_gpu = [max(1, room.total // GIB) for room in rooms if not room.of_host]
    numbers = {"world_size": world_size, **({"gpu_memory": of_gpu[0]} if of_gpu else {})}
    # rows are read after this, once; what is refused here does not depend on them
    return PlanRequest(numbers, reads_rows=False)


def _plan_or_none(request: PlanRequest, resolved: Resolved[Any], workload: Workload) -> RunPlan | None:
    """Return the plan; None for a model without known widths, and where the start refuses the settings itself."""
    try:
        return plan_run(request, resolved, workload)
    except RftError:
        return None


def _no_room(resolved: Resolved[Any], plan: RunPlan, room: Room, remedy: str) -> PreflightError:
    terms = room.terms(plan.terms, resolved.values)
    of_rank = sum(term.num_bytes for term in terms)
    ranks = f" in each of {room.num_ranks} ranks" if room.num_ranks > 1 else ""
    return PreflightError(
        code="memory.no_room",
        what=f"weights, gradients and the optimizer's state take {_gib(of_rank)}{ranks}, and {room.name} has "
        f"{_gib(room.total)}",
        where=f"pretrain = {resolved.values['pretrain']}: "
        + "; ".join(f"{term.name} {_gib(term.num_bytes)} ({term.formula})" for term in terms),
        why=f"no size of a micro-batch makes them smaller; the largest part is {terms[0].name}",
        state="no weights were loaded and nothing was written",
        do=remedy,
    )


def _remedy(resolved: Resolved[Any], workload: Workload, world_size: int, rooms: Sequence[Room]) -> str:
    """Return the first change of settings after which a plan fits, else how large a machine would have to be."""
    request = _request(world_size, rooms)
    for flags, changes in _ways(resolved.values, world_size, on_gpu=any(not room.of_host for room in rooms)):
        changed = resolved.with_values(changes)
        plan = _plan_or_none(request, changed, workload)
        if plan is not None and all(room.need(plan.terms, changed.values) <= room.total for room in rooms):
            return flags
    plan = _plan_or_none(request, resolved, workload)
    assert plan is not None, "a plan was there before"
    most = max(room.need(plan.terms, resolved.values) / room.total for room in rooms)
    count = world_size * math.ceil(most / (1 - HEADROOM))
    if any(not room.of_host for room in rooms):
        plan_of = f"rft-train plan {resolved.command} with these flags, --fsdp --world_size {count}"
        return f"--fsdp on {count} GPUs: {plan_of}"
    return "a smaller model, or a machine with more memory"


def _ways(values: Mapping[str, Any], world_size: int, *, on_gpu: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(flags, their values) that make the state of a rank smaller; those which leave the result as it is first."""
    adapts, plain_moments = bool(values.get("lora_rank")), values.get("optimizer") != "muon"
    # adapters have few moments, and those of Muon are not offloaded
    for changes in smaller_shares(values, world_size, on_device=on_gpu and plain_moments and not adapts):
        yield " ".join(f"--{name}" for name in changes), changes
    if "lora_rank" in values and not adapts and not _freezes(values):
        yield "--lora_rank 16", {"lora_rank": 16}


def _taken(resolved: Resolved[Any], plan: RunPlan, rooms: Sequence[Room]) -> Iterator[str]:
    """Say where what is needed would fit, and others hold the memory."""
    for room in rooms:
        need = room.need(plan.terms, resolved.values)
        if need > room.free:
            yield (
                f"memory: {_gib(need)} are needed for weights, gradients and the optimizer's state, and "
                f"{_gib(room.free)} of {_gib(room.total)} are free on {room.name}: another program holds "
                "the rest (rft-train doctor)"
            )


def _may_not_fit(plan: RunPlan, *, sees_images: bool) -> Iterator[str]:
    """Say that a step may exceed the GPU, and the flags with which it does not."""
    ladder = plan.ladder
    if ladder is None:
        return
    training = [term for term in plan.terms if term.in_training and not term.on_host]
    largest = max(training, key=lambda term: term.num_bytes)
    helps = f"; {ladder.flags} makes it {_gib(ladder.training_bytes)}" if ladder.flags else ""
    # how many features images have is known once rows are read
    helps += ", besides what the vision tower keeps of the images (rft-train plan counts it)" if sees_images else ""
    yield (
        f"memory: a step takes up to {_gib(plan.training_bytes)} of {_gib(ladder.limit_bytes)}, most of it "
        f"{largest.name} ({_gib(largest.num_bytes)}){helps}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
