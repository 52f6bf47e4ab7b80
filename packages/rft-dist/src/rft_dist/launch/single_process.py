"""A process group of one, for libraries that want a group also where there is one process."""

from __future__ import annotations

import atexit

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

_GROUP_NAME = "rft_alone"


def init_single_process_group(device: torch.device) -> None:
    """Make the group where there is none. It stays until the process ends: libraries keep it from run to run."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, group_name=_GROUP_NAME)
    atexit.register(_leave)


def is_single_process_group() -> bool:
    """Return whether the default process group is one of a single process."""
    return dist.is_initialized() and dist.get_world_size() == 1


def _leave() -> None:
    if is_single_process_group():
        dist.destroy_process_group()
