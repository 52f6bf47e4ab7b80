"""Memory that runs out while the models of a run are loaded, before any micro-batch: an error of its own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from rft.process.machine import Machine
from rft.resolved import Resolved
from rft_core.errors import ServiceError
from rft_engine.process.gpu_processes import Inventory, nvidia_inventory
from rft_trainer.batches.out_of_memory import is_out_of_memory


@contextmanager
def loading(resolved: Resolved[Any], machine: Machine, inventory: Inventory = nvidia_inventory) -> Generator[None]:
    """Turn memory that runs out inside the block, in which models and engine are built, into a `ServiceError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _no_room(resolved, machine, error, inventory) from error


def _no_room(resolved: Resolved[Any], machine: Machine, error: BaseException, inventory: Inventory) -> ServiceError:
    on_gpu = torch.device(machine.device).type == "cuda"
    holders = [
        f"pid {process.pid} ({process.name}) {process.used_mib:,} MiB"
        for device in (inventory() if on_gpu else ())
        for process in device.processes
    ]
    free, plan = "", f"rft-train plan {resolved.command} with the same flags"
    if on_gpu:
        left, total = torch.cuda.mem_get_info(machine.device)
        free = f"; {left / 2**20:,.0f} of {total / 2**20:,.0f} MiB are free"
        plan += f" and --gpu_memory {total // 2**30}"
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ServiceError(
        code="memory.loading",
        what=f"out of memory while the models of the run were loaded: {first_line}{free}",
        where=f"rank {machine.ranks.rank} on {machine.device}" + (f"; held by {', '.join(holders)}" if holders else ""),
        why="weights, the optimizer's state and the engine have to fit before the first micro-batch",
        state="nothing was trained",
        do=f"{plan} names the largest part and what makes it fit",
    )
