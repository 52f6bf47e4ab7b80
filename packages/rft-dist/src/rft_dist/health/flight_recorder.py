"""Torch's own records of collectives that libraries issue: DDP, FSDP and DeepSpeed."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
"""Names of the ring buffer's length in newer and older versions of torch; it is off without one."""


def record_flights() -> None:
    """Enable NCCL's flight recorder; call it before a process group is made."""
    for name, value in FLIGHT_RECORDER.items():
        os.environ.setdefault(name, value)


def library_calls() -> int:
    """Collectives issued by all process groups of this process so far; 0 where torch does not tell."""
    if not dist.is_available() or not dist.is_initialized():
        return 0
    groups: dict[Any, Any] = getattr(distributed_c10d._world, "pg_map", {})
    total = 0
    for group in list(groups):
        try:
            total += int(group._get_sequence_number_for_group())
        except (AttributeError, RuntimeError):
            continue  # a kind of group that counts nothing
    return total


def abort_groups(folder: Path | None, rank: int) -> None:
    """Write NCCL's last collectives into the run's logs and let go of its kernels; nothing for other backends."""
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return
    _write_flights(folder, rank)
    abort = getattr(distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        helper = threading.Thread(target=abort, daemon=True)  # a communicator that hangs may hang its abort
        helper.start()
        helper.join(timeout=2.0)


def _write_flights(folder: Path | None, rank: int) -> None:
    dump = getattr(getattr(dist, "_C", None) or _c10d(), "_dump_nccl_trace_json", None)
    if folder is None or dump is None:
        return
    try:
        text = dump()
        (folder / "logs" / f"nccl_rank_{rank}.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    except (OSError, RuntimeError, json.JSONDecodeError):
        return  # the page that names the culprit matters more


def _c10d() -> Any:
    import torch

    return getattr(torch._C, "_distributed_c10d", None)
