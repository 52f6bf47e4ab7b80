"""Process groups: read the environment, meet the other ranks, create the collectives."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from rft_core.errors import PeerError, PreflightError
from rft_dist.collectives import Collectives, SingleProcess, TorchCollectives
from rft_dist.health.activity import Activity
from rft_dist.health.collective_check import FingerprintCheck
from rft_dist.health.flight_recorder import record_flights
from rft_dist.health.monitor import BEAT_SECONDS, Watch
from rft_dist.launch.environment import (
    RankInfo,
    environment_report,
    ranks_from_environment,
    requested_backend,
    start_seconds,
    timeout_seconds,
)
from rft_dist.launch.rendezvous import (
    another_client,
    meet,
    meeting_ended,
    met,
    refuse_another,
    serves_store,
    this_process,
)
from rft_dist.launch.single_process import is_single_process_group
from rft_dist.settings import WatchSettings

__all__ = [
    "HealthConfig",
    "RankInfo",
    "backend_for",
    "environment_report",
    "meet_ranks",
    "ranks_from_environment",
    "start_process_group",
    "start_watch",
    "stop_process_group",
    "timeout_seconds",
]


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Health monitoring of a run: the record of its activity, and the limits."""

    activity: Activity
    settings: WatchSettings
    always_compares: bool = False
    """Compare every collective over the ranks, not only those of the first steps."""


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


def meet_ranks(info: RankInfo, environment: Mapping[str, str] | None = None) -> Store | None:
    """The store at which all ranks have announced themselves; None for a single process.

    Waits at most RFT_START_TIMEOUT seconds (else NCCL_TIMEOUT, else 600), and says about every ten for whom. From here
    on a watch can tell who is gone.
    Raises PeerError naming the ranks that did not come, and where the ranks of a program meet again without torchrun.
    """
    values = os.environ if environment is None else environment
    if info.world_size == 1:
        return None
    refuse_another(info, values)
    store = meet(info, start_seconds(values), values)
    met(info)
    return store


def start_process_group(
    info: RankInfo,
    device: torch.device,
    *,
    store: Store | None = None,
    environment: Mapping[str, str] | None = None,
    compare: Callable[[Store], None] | None = None,
    watched: HealthConfig | None = None,
) -> Collectives:
    """Join the other ranks and give the exchanges between them; a single process joins nothing.

    Waits for the others as `meet_ranks` does, and in every collective afterwards at most NCCL_TIMEOUT seconds (600 by
    default); `watched` collectives, which the watch ends, wait for as long as it allows.
    `store` is that of `meet_ranks`; None meets them first.
    Raises PeerError naming the ranks that did not come. `compare` is called with
    a store that all ranks share, between the meeting and the first connection of the backend.
    """
    if info.world_size == 1:
        return SingleProcess()
    assert not dist.is_initialized(), "the process group was started before"
    values = os.environ if environment is None else environment
    atexit.register(stop_process_group)
    backend, seconds = backend_for(device, values), timeout_seconds(values)
    store = store or meet(info, start_seconds(values), values)
    if compare is not None:
        # before the backend connects: ranks that differ would hang in there without a name
        compare(PrefixStore("preflight", store))
    patience = seconds if values.get("NCCL_TIMEOUT") or watched is None else max(seconds, _patience(watched.settings))
    if backend == "nccl":
        record_flights()
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=patience),
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        ranks = "1 rank" if info.world_size == 1 else f"{info.world_size} ranks"
        raise PeerError(
            code="launch.group_failed",
            what=f"{this_process(info)} could not start {backend} with {ranks}",
            where=f"{info.master_addr}:{info.master_port}",
            why=(str(error).splitlines() or ["no reason was given"])[0][:300],
            do="export TORCH_DISTRIBUTED_DEBUG=DETAIL",
        ) from error
    carrier = device if backend == "nccl" else torch.device("cpu")
    if watched is None:
        return TorchCollectives(carrier, where=this_process(info))
    check = FingerprintCheck(
        # a connection of its own: here a rank may wait very long for rank 0's next call
        PrefixStore("calls", another_client(info, values)),
        watched.activity,
        rank=info.rank,
        steps=watched.settings.fingerprint_steps,
        always=watched.always_compares,
    )
    return TorchCollectives(carrier, where=this_process(info), activity=watched.activity, compare=check.compare)


def start_watch(
    info: RankInfo,
    watched: HealthConfig,
    *,
    environment: Mapping[str, str] | None = None,
    scrub: Callable[[str], str] = str,
    beat: float = BEAT_SECONDS,
) -> Watch:
    """The watch over this process, and over the others, which must have met (`meet_ranks`, or a group that started).

    `scrub` removes secrets from what is stored; `beat` is the time between two heartbeats, in seconds.

    Call `close` or `failed` of it before `stop_process_group`: with that, rank 0 stops serving the store.
    """
    values = os.environ if environment is None else environment
    is_single = info.world_size == 1
    watch = Watch(
        watched.activity,
        watched.settings,
        rank=info.rank,
        world_size=info.world_size,
        store=None if is_single else PrefixStore("watch", another_client(info, values)),
        serves_store=not is_single and serves_store(info, values),
        scrub=scrub,
        beat=beat,
    )
    watch.start()
    return watch


def _patience(settings: WatchSettings) -> float:
    """Longest wait in one collective, in seconds: the watch, which can name who is missing, comes first."""
    limits = (settings.watchdog_seconds, settings.watchdog_first_seconds, settings.watchdog_collective_seconds)
    return _WEEK if 0 in limits else max(limits) + 60.0


_WEEK = 7 * 86400.0


def stop_process_group() -> None:
    """Leave the group of the ranks; nothing happens where none was started. Also runs when the interpreter ends.

    A gloo group that is destroyed after the interpreter, with a connection that a peer closed,
    aborts the process (torch 2.13: "terminate called without an active exception"), which would
    replace the exit code of the error that is being reported.
    """
    if dist.is_initialized() and not is_single_process_group():
        # DeepSpeed keeps groups of its own, with which a later one of this process would be taken for the first
        shared = sys.modules.get("deepspeed.comm")
        if shared is not None and shared.is_initialized():
            shared.destroy_process_group()
        else:
            dist.destroy_process_group()
        meeting_ended()
        gc.collect()  # the frames of a caught error may hold the group in a cycle
