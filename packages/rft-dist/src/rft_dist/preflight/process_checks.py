"""Checks that one process makes before it meets the others: its numbers, its variables, its port.

No torch is imported here.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from rft_core.errors import PreflightError
from rft_dist.launch.environment import SPAWNED, RankInfo, origin_of
from rft_dist.launch.slurm import num_tasks_unused, task_of, tasks_per_node
from rft_dist.planning.parallel_dims import (
    BatchShare,
    Launcher,
    ParallelDims,
    RequestedDims,
    SourcedNumber,
    resolve_grid,
)
from rft_dist.preflight.environment_variables import refuse_contradictions

_ONE = SourcedNumber(1, "default")


def check_start(
    ranks: RankInfo,
    environment: Mapping[str, str] | None = None,
    *,
    num_devices: int = 0,
    shares_devices: bool = False,
    share: BatchShare | None = None,
    sp_size: SourcedNumber = _ONE,
    tp_size: SourcedNumber = _ONE,
    interfaces: Collection[str] | None = None,
) -> ParallelDims:
    """The grid that this process is part of.

    `num_devices` counts the GPUs that torch sees, 0 where the run is on CPUs; `shares_devices` says that ranks
    may share one (gloo). `interfaces` are the machine's network interfaces, read from the system by default.

    Raises:
        PreflightError: numbers or variables contradict one another, or the port is taken.
    """
    values = os.environ if environment is None else environment
    requested = requested_dims(ranks, values, num_devices=0 if shares_devices else num_devices, share=share)
    grid = resolve_grid(replace(requested, sp_size=sp_size, tp_size=tp_size))
    refuse_contradictions(values, ranks, grid, interfaces_here() if interfaces is None else interfaces)
    if ranks.world_size > 1 and ranks.rank == 0 and values.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        refuse_taken_port(ranks)
    return grid


def requested_dims(
    ranks: RankInfo, values: Mapping[str, str], *, num_devices: int = 0, share: BatchShare | None = None
) -> RequestedDims:
    """Return the grid that the launcher's variables request."""
    launcher = launcher_of(values)
    per_node = _first(values, "LOCAL_WORLD_SIZE") if launcher in ("torchrun", "--nproc") else None
    nodes = _first(values, "GROUP_WORLD_SIZE") if launcher == "torchrun" else None
    if launcher == "srun":
        nodes = _first(values, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
        counts = set(tasks_per_node(values.get("SLURM_STEP_TASKS_PER_NODE", "")))
        if len(counts) == 1:
            per_node = SourcedNumber(counts.pop(), "SLURM_STEP_TASKS_PER_NODE (SLURM)")
    written = _first(values, "GPUS_PER_NODE"), _first(values, "NUM_NODES")
    if ranks.world_size == 1 and launcher == "by hand":
        written = (None, None)  # a single process on a machine whose profile describes whole jobs
    return RequestedDims(
        ranks=SourcedNumber(ranks.world_size, ranks.origins["world_size"]),
        nodes=written[1] or nodes,
        per_node=written[0] or per_node,
        devices=_devices(values, num_devices, ranks),
        share=share,
        launcher=launcher,
    )


def launcher_of(values: Mapping[str, str]) -> Launcher:
    """Who numbered the ranks."""
    if "TORCHELASTIC_RUN_ID" in values:
        return "torchrun"
    if values.get(SPAWNED):
        return "--nproc"
    return "srun" if task_of(values) is not None else "by hand"


def forgotten_srun(ranks: RankInfo, values: Mapping[str, str]) -> str:
    """A note where a job of several tasks runs its script's program once, without srun; else empty."""
    tasks = num_tasks_unused(values)
    if ranks.world_size > 1 or not tasks:
        return ""
    return f"SLURM_NTASKS={tasks}, and this is one process: the job's other tasks need `srun` before the program"


def _first(values: Mapping[str, str], *names: str) -> SourcedNumber | None:
    for name in names:
        if values.get(name, "").isdecimal():
            return SourcedNumber(
                int(values[name]), origin_of(values, name) if "SLURM" not in name else f"{name} (SLURM)"
            )
    return None


def _devices(values: Mapping[str, str], num_devices: int, ranks: RankInfo) -> SourcedNumber | None:
    """GPUs of this machine; None where each task sees only the one that was bound to it."""
    if num_devices < 1 or ranks.world_size == 1:
        return None
    on_node = _first(values, "SLURM_GPUS_ON_NODE")
    if on_node is not None:
        return on_node
    bound = num_devices == 1 and values.get("CUDA_VISIBLE_DEVICES", "")
    return None if bound else SourcedNumber(num_devices, "CUDA devices that torch sees")


def interfaces_here() -> set[str]:
    """Names of this machine's network interfaces."""
    return {name for _, name in socket.if_nameindex()}


def refuse_taken_port(ranks: RankInfo) -> None:
    """Raise PreflightError where another process listens at the port at which rank 0 is to listen."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # a port at which only connections of an ended run are closing is free
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, ranks.master_port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(ranks) from error


def _taken(ranks: RankInfo) -> PreflightError:
    port = ranks.master_port
    return PreflightError(
        code="launch.port_taken",
        what=f"port {port} is held by {holder_of(port)}",
        where=ranks.origins["master_port"],
        why="rank 0 listens there, and one process can listen at a port",
        do=f"export MASTER_PORT={free_port()} for every rank",
    )


def free_port() -> int:
    """A TCP port that nothing uses now, chosen by the system."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def holder_of(port: int) -> str:
    """The process that has a TCP port, as "pid 123 (python train.py)"; what can be seen of it without root."""
    sockets = _sockets_at(port)
    if not sockets:
        return "a process that cannot be seen from here"
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and _holds(process, sockets):
            return f"pid {process.name} ({_command_of(process)})"
    return "a process of another user or container"


def _sockets_at(port: int) -> set[str]:
    """Inodes of the sockets bound to the port, as links under /proc name them."""
    sockets: set[str] = set()
    for name in ("tcp", "tcp6"):
        try:
            rows = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        parts = [row.split() for row in rows]
        # 0A is the state LISTEN, and field 9 the inode
        sockets |= {f"socket:[{p[9]}]" for p in parts if int(p[1].rpartition(":")[2], 16) == port and p[3] == "0A"}
    return sockets


def _holds(process: Path, sockets: Collection[str]) -> bool:
    try:
        return any(os.readlink(link) in sockets for link in (process / "fd").iterdir())
    except OSError:
        return False


def _command_of(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = ""
    return words[:80] or "unknown program"
