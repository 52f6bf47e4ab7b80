"""Settings with which a step of a run fits the memory of its ranks: the ladder of `planning.fit_ladder`, applied.

The windows of a step and its mathematics stay as they are asked for, and so does every setting that is given.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from rft.planning.fit_ladder import HEADROOM, Ladder
from rft.planning.run_plan import PlanRequest, RunPlan, plan_run
from rft.planning.workload import SFT
from rft.process.machine import Machine
from rft.resolved import Origin, Resolved
from rft.settings import PretrainSettings
from rft_dist.planning.memory_estimate import MemoryTerm

_GIB = 2**30
_CHOSEN_BY_NOBODY = ("default", "derived")
"""Kinds of origins of values that may be changed."""


def fitted_on_all_ranks(resolved: Resolved[PretrainSettings], machine: Machine) -> Resolved[PretrainSettings]:
    """Return the settings that fit the rank with the least memory; all ranks call it, and choose the same."""
    # ranks with other micro-batches than the others would wait for one another
    limits = [
        json.loads(part) for part in machine.collectives.gather_bytes(json.dumps(_limit(resolved, machine)).encode())
    ]
    known = [limit for limit in limits if limit]
    return _fitted(resolved, machine.ranks.world_size, min(known) if known else 0)


def fitted(resolved: Resolved[PretrainSettings], machine: Machine) -> Resolved[PretrainSettings]:
    """Return the settings that fit the memory of this process, with a note on each change and what it leaves.

    Raises:
        OptionsError: numbers of ranks that contradict one another, as the start would raise it.
    """
    return _fitted(resolved, machine.ranks.world_size, _limit(resolved, machine))


def _limit(resolved: Resolved[PretrainSettings], machine: Machine) -> int:
    """Return the GiB that a rank may take; 0 = no limit."""
    chosen = resolved.settings.training
    if chosen.fit_memory == "off" or chosen.memory_limit_gb:
        return chosen.memory_limit_gb
    device = torch.device(machine.device)
    return _gpu_bytes(device) // _GIB if device.type == "cuda" else 0


def _gpu_bytes(device: torch.device) -> int:
    cuda: Any = torch.cuda  # torch leaves the type of its properties open
    return int(cuda.get_device_properties(device).total_memory)


def _fitted(resolved: Resolved[PretrainSettings], world_size: int, limit: int) -> Resolved[PretrainSettings]:
    if not limit:
        return resolved
    fixed = frozenset(name for name, origin in resolved.origins.items() if origin.kind not in _CHOSEN_BY_NOBODY)
    request = PlanRequest({"world_size": world_size}, fixed=fixed, traced=True)
    plan = plan_run(request, resolved.with_values({"memory_limit_gb": limit}), SFT)
    ladder = plan.ladder
    if ladder is None:
        asked = resolved.settings.training.memory_limit_gb
        return replace(resolved, notes=(*resolved.notes, _need(plan, limit))) if asked else resolved
    changed = resolved.with_values(ladder.changes, Origin("derived", text=f"fit: {limit} GiB"))
    return replace(changed, notes=(*resolved.notes, _need(plan, limit), *_notes(changed, plan, ladder)))


def _notes(changed: Resolved[PretrainSettings], plan: RunPlan, ladder: Ladder) -> list[str]:
    lines = [
        f"fit: {rung.training_bytes / _GIB:.2f} GiB with {rung.flags} "
        f"({rung.cost if rung.kept else 'left out: the peak is elsewhere'})"
        for rung in ladder.rungs
    ]
    lines += [f"fit: {name} = {json.dumps(value)} ({changed.origins[name]})" for name, value in ladder.changes.items()]
    if not ladder.fits:
        lines.append(
            f"fit: {ladder.training_bytes / _GIB:.2f} GiB exceed the limit, and what is given was not changed; more "
            "ranks that share the weights out (--fsdp, --zero_stage) or a smaller --max_len take less"
        )
    return lines


def _need(plan: RunPlan, limit: int) -> str:
    """Say what a step takes of the limit, and which part of it is the largest."""
    largest = max((term for term in plan.terms if term.in_training and not term.on_host), key=_at_peak)
    return (
        f"fit: a step takes {plan.training_bytes / _GIB:.2f} GiB of {limit * (1 - HEADROOM):.2f} ({limit} without "
        f"{HEADROOM:.0%}); the largest part is {largest.name}, {_at_peak(largest) / _GIB:.2f} GiB"
    )


def _at_peak(term: MemoryTerm) -> int:
    return term.num_bytes if term.at_peak is None else term.at_peak
