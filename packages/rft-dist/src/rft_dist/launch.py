"""From a process to a member of a group: read the environment, meet the others, hand out collectives."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from rft_algos.errors import PeerError, PreflightError
from rft_dist.collectives import Collectives, SingleProcess, TorchCollectives
from rft_dist.environment import (
    RankInfo,
    environment_report,
    ranks_from_environment,
    requested_backend,
    timeout_seconds,
)
from rft_dist.rendezvous import meet, this_process

__all__ = [
    "RankInfo",
    "backend_for",
    "environment_report",
    "ranks_from_environment",
    "start_process_group",
    "stop_process_group",
    "timeout_seconds",
]


def backend_for(device: torch.device, environment: Mapping[str, str] | None = None) -> str:
    """ "nccl" on CUDA and "gloo" elsewhere; NCCL_BACKEND=gloo forces gloo.

    Raises PreflightError for NCCL_BACKEND=nccl where the device is not CUDA.
    """
    requested = requested_backend(environment)
    if requested == "nccl" and device.type != "cuda":
        raise PreflightError(
            code="launch.backend_needs_cuda",
            what=f"NCCL_BACKEND = nccl, device = {device}",
            where="NCCL_BACKEND (environment)",
            why="NCCL carries tensors between CUDA devices only",
            do="export NCCL_BACKEND=gloo",
        )
    return requested or ("nccl" if device.type == "cuda" else "gloo")


def start_process_group(
    info: RankInfo, device: torch.device, *, environment: Mapping[str, str] | None = None
) -> Collectives:
    """Join the other ranks and give the exchanges between them; a single process joins nothing.

    Waits at most NCCL_TIMEOUT seconds (600 by default) for the others, here and in every
    collective afterwards. Raises PeerError naming the ranks that did not come.
    """
    if info.world_size == 1:
        return SingleProcess()
    assert not dist.is_initialized(), "the process group was started before"
    values = os.environ if environment is None else environment
    atexit.register(stop_process_group)
    backend, seconds = backend_for(device, values), timeout_seconds(values)
    store = meet(info, seconds, values)
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=seconds),
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        raise PeerError(
            code="launch.group_failed",
            what=f"{this_process(info)} could not start {backend} with {info.world_size} ranks",
            where=f"{info.master_addr}:{info.master_port}",
            why=(str(error).splitlines() or ["no reason was given"])[0][:300],
            do="export TORCH_DISTRIBUTED_DEBUG=DETAIL",
        ) from error
    return TorchCollectives(device if backend == "nccl" else torch.device("cpu"), where=this_process(info))


def stop_process_group() -> None:
    """Leave the group; nothing happens where none was started. Also runs when the interpreter ends.

    A gloo group that is destroyed after the interpreter, with a connection that a peer closed,
    aborts the process (torch 2.13: "terminate called without an active exception"), which would
    replace the exit code of the error that is being reported.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # the frames of a caught error may hold the group in a cycle
