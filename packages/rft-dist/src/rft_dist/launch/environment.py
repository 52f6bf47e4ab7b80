"""Rank of this process, read from environment variables, and what those variables do.

Four ways to set them: `torchrun` does it; `--nproc` does; `srun` sets its own, from which the same four
follow; or a person exports MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE and starts `python` once a
rank. With none of them set the process is alone. A part of the set is refused: a process that took
itself for a single one would write over its peers' files. No torch is imported here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from rft_core.errors import PreflightError
from rft_dist.launch.slurm import SlurmTask, task_of

DEFAULT_TIMEOUT_SECONDS = 600.0
"""Longest wait for the other ranks in one collective where NCCL_TIMEOUT is not set."""

BACKENDS = ("nccl", "gloo")

_REQUIRED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_EXAMPLES = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}

START_TIMEOUT = "RFT_START_TIMEOUT"
"""Longest wait for all ranks to arrive at the start, in seconds."""

SPAWNED = "RFT_NPROC"
"""Set by `--nproc` in the ranks that it starts: their number."""

LATER_PORTS = "RFT_LATER_PORTS"
"""Ports at which the ranks of one launcher meet after their first meeting, in that order, with commas between."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Place of this process among all of them.

    Example: the second of four processes, on the first machine, is
    `RankInfo(rank=1, world_size=4, local_rank=1, node_rank=0, master_addr="10.0.0.1", master_port=29500, origins=...)`.
    """

    rank: int
    """0 to world_size - 1."""
    world_size: int
    """Number of processes of the run."""
    local_rank: int
    """Index among the processes of this machine: the number of its accelerator."""
    node_rank: int
    """Index of this machine."""
    master_addr: str
    """Host at which rank 0 (or torchrun) listens; empty for a single process."""
    master_port: int
    """Its TCP port; 0 for a single process."""
    origins: Mapping[str, str]
    """Field name -> where its value came from, such as "RANK (torchrun)" or "default"."""


def ranks_from_environment(environment: Mapping[str, str] | None = None, *, num_local_devices: int = 0) -> RankInfo:
    """This process's place, from `environment` (the process's own by default).

    `num_local_devices` is the number of accelerators of this machine: without LOCAL_RANK and
    LOCAL_WORLD_SIZE the local rank is RANK modulo that number, or RANK where it is 0.

    Raises PreflightError for a partial set, a value that is no integer, RANK outside
    0..WORLD_SIZE-1 or a port outside 1..65535.
    """
    variables = os.environ if environment is None else environment
    task = None if _is_launched(variables) else task_of(variables)
    values = variables if task is None else _with_task(variables, task)
    # LOCAL_RANK counts too: alone it is a part of the set, and refused below
    if not any(values.get(name) for name in (*_REQUIRED, "LOCAL_RANK")):
        fields = ("rank", "world_size", "local_rank", "node_rank", "master_addr", "master_port")
        return RankInfo(0, 1, 0, 0, "", 0, dict.fromkeys(fields, "default"))
    _refuse_partial(values)
    rank, world_size = _integer(values, "RANK"), _integer(values, "WORLD_SIZE")
    _refuse_out_of_range(rank, world_size, _setter(values))
    port = _integer(values, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise _bad_value("MASTER_PORT", str(port), "a TCP port from 1 to 65535", "export MASTER_PORT=29500")
    local_rank, local_origin = _local_rank(values, rank, num_local_devices)
    if task is not None and not variables.get("LOCAL_RANK"):
        local_origin = origin_of(variables, "LOCAL_RANK")
    node_rank, node_origin = _node_rank(values)
    if task is not None and not variables.get("NODE_RANK"):
        node_origin = origin_of(variables, "NODE_RANK")
    required = {name.lower(): origin_of(variables, name) for name in _REQUIRED}
    origins = required | {"local_rank": local_origin, "node_rank": node_origin}
    return RankInfo(rank, world_size, local_rank, node_rank, values["MASTER_ADDR"], port, origins)


def take_next_port(environment: MutableMapping[str, str]) -> None:
    """Have the next meeting of these ranks be at the next port that their launcher holds.

    The store at which they met before closed with that meeting. Nothing changes where no launcher holds further ports:
    a single process meets nobody, and torchrun serves one store for all meetings.
    """
    first, _, rest = environment.get(LATER_PORTS, "").partition(",")
    if first:
        environment.update({"MASTER_PORT": first, LATER_PORTS: rest})


def _is_launched(values: Mapping[str, str]) -> bool:
    """Return whether a launcher other than srun numbered the ranks."""
    return "TORCHELASTIC_RUN_ID" in values or bool(values.get(SPAWNED))


def _with_task(variables: Mapping[str, str], task: SlurmTask) -> dict[str, str]:
    """Add the variables that follow from an srun task; exported ones stay."""
    from_task = {
        "MASTER_ADDR": task.first_host,
        "MASTER_PORT": f"{task.port}",
        "RANK": f"{task.rank}",
        "WORLD_SIZE": f"{task.world_size}",
        "LOCAL_RANK": f"{task.local_rank}",
        "NODE_RANK": f"{task.node_rank}",
    }
    return {**variables, **{name: value for name, value in from_task.items() if not variables.get(name)}}


_FROM_SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "NODE_RANK": "SLURM_NODEID",
    "MASTER_ADDR": "first host of SLURM_STEP_NODELIST",
    "MASTER_PORT": "from SLURM_JOB_ID",
}


def origin_of(variables: Mapping[str, str], name: str) -> str:
    """Return the origin of a rank variable's value: the variable itself, or one of SLURM."""
    if variables.get(name) or name not in _FROM_SLURM:
        return f"{name} ({_setter(variables)})"
    return f"{_FROM_SLURM[name]} (SLURM)"


def timeout_seconds(environment: Mapping[str, str] | None = None) -> float:
    """Longest wait in one collective, in seconds: NCCL_TIMEOUT, else 600. PreflightError unless positive."""
    return _seconds(os.environ if environment is None else environment, "NCCL_TIMEOUT") or DEFAULT_TIMEOUT_SECONDS


def start_seconds(environment: Mapping[str, str] | None = None) -> float:
    """Longest wait for all ranks to arrive, in seconds: RFT_START_TIMEOUT, else as `timeout_seconds`."""
    values = os.environ if environment is None else environment
    return _seconds(values, START_TIMEOUT) or timeout_seconds(values)


def _seconds(values: Mapping[str, str], name: str) -> float | None:
    """None where it is not set."""
    text = values.get(name, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 7 * 86400:
        raise _bad_value(name, text, "seconds, above 0 and at most a week", f"export {name}=1800")
    return seconds


def requested_backend(environment: Mapping[str, str] | None = None) -> str | None:
    """NCCL_BACKEND, "nccl" or "gloo", or None where it is not set. PreflightError for another word."""
    text = (os.environ if environment is None else environment).get("NCCL_BACKEND", "")
    if text and text not in BACKENDS:
        raise _bad_value("NCCL_BACKEND", text, "nccl or gloo", "export NCCL_BACKEND=gloo")
    return text or None


_LIBRARY_EFFECTS: dict[str, str] = {
    "NCCL_DEBUG": "how much NCCL prints (WARN, INFO, TRACE)",
    "NCCL_SOCKET_IFNAME": "network interfaces that NCCL may use",
    "NCCL_IB_DISABLE": "1 keeps NCCL off InfiniBand: traffic between machines goes through sockets",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1 lets torch keep NCCL's tensors alive itself, which lowers peak memory",
}
_PROCESS_EFFECTS: dict[str, str] = {
    "MASTER_ADDR": "host at which the ranks meet",
    "MASTER_PORT": "TCP port at which the ranks meet",
    "WORLD_SIZE": "number of processes of the run",
    "RANK": "number of this process",
    "NODE_RANK": "number of this machine, named in messages",
    "NUM_NODES": "number of machines; compared with the ranks that there are",
    "GPUS_PER_NODE": "ranks of each machine; compared with the ranks and GPUs that there are",
    "SLURM_PROCID": "number of this process under srun, where RANK is not set",
    "SLURM_STEP_NUM_TASKS": "number of processes of the run under srun, where WORLD_SIZE is not set",
    "SLURM_STEP_NODELIST": "machines of the run under srun; the ranks meet at the first, where MASTER_ADDR is not set",
    "SLURM_LOCALID": "index of this process on its machine under srun, where LOCAL_RANK is not set",
    "SLURM_NODEID": "number of this machine where neither torchrun nor NODE_RANK gives it, named in messages",
    "RFT_START_TIMEOUT": "longest wait for all ranks to arrive at the start, in seconds; not set: NCCL_TIMEOUT, or 600",
    "NCCL_TIMEOUT": "longest wait for the other ranks in one collective, in seconds, whatever the backend",
    "NCCL_BACKEND": "library that carries the collectives: gloo moves them over the CPU, slower, for debugging",
    "GLOO_SOCKET_IFNAME": "network interface that gloo uses",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL compares every collective over the ranks; read once, when torch starts",
    "CUDA_LAUNCH_BLOCKING": "1 waits for every CUDA kernel, so that an error names the right line; slow",
}
REPORTED = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "NODE_RANK", "NUM_NODES", "GPUS_PER_NODE"),
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_LOCALID", "SLURM_NODEID"),
    *("RFT_START_TIMEOUT", "NCCL_TIMEOUT", "NCCL_BACKEND", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME"),
    *("GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE"),
    *("TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_DISTRIBUTED_DEBUG", "CUDA_LAUNCH_BLOCKING"),
)
"""Every variable that is explained in the documentation, in the order of `environment_report`."""
_OF_LIBRARIES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
"""Beginnings of the variables of the libraries that carry collectives: whatever is set of them is reported."""
_OF_NCCL = {
    "NCCL_P2P_DISABLE": "1 keeps GPUs of one machine from reading one another's memory, which is slower",
    "NCCL_P2P_LEVEL": "how far apart GPUs may be that read one another's memory",
    "NCCL_SHM_DISABLE": "1 keeps NCCL off the shared memory of a machine: its sockets carry what that would",
    "NCCL_IB_HCA": "InfiniBand adapters that NCCL may use",
    "NCCL_IB_GID_INDEX": "entry of the adapters' address table, for RoCE",
    "NCCL_IB_TIMEOUT": "how long InfiniBand waits before it sends again, as a power of two",
    "NCCL_NET": "network plug-in that NCCL uses",
    "NCCL_NET_GDR_LEVEL": "how far apart a GPU and an adapter may be that use GPUDirect",
    "NCCL_ALGO": "algorithms of collectives that NCCL may choose among",
    "NCCL_PROTO": "protocols that NCCL may choose among",
    "NCCL_NVLS_ENABLE": "0 turns reductions inside NVLink switches off",
    "NCCL_CUMEM_ENABLE": "1 lets NCCL allocate through CUDA's virtual memory",
    "NCCL_CROSS_NIC": "whether a ring may change the network card between machines",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what torch does where a collective of NCCL fails",
    "TORCH_NCCL_BLOCKING_WAIT": "1 makes the host wait for every collective",
}


def environment_report(
    environment: Mapping[str, str] | None = None, *, backend: str | None = None
) -> list[tuple[str, str, str]]:
    """(name, value, effect) of every variable that is set; the effect ends with who set it.

    `backend` is the one in use where it is known ("gloo" or "nccl"), else NCCL_BACKEND decides:
    under gloo the variables of NCCL are listed as having no effect.
    """
    values = os.environ if environment is None else environment
    in_use = backend or requested_backend(values)
    rows: list[tuple[str, str, str]] = []
    for name in REPORTED:
        if not values.get(name):
            continue
        effect = _LIBRARY_EFFECTS.get(name) or _PROCESS_EFFECTS[name]
        if name in _LIBRARY_EFFECTS and in_use == "gloo":
            effect = f"no effect: the collectives run over gloo ({effect})"
        by = _setter(values) if name in _REQUIRED else _scheduler(name)
        rows.append((name, values[name], f"{effect}; set by {by}"))
    others = sorted(name for name in values if name.startswith(_OF_LIBRARIES) and name not in REPORTED and values[name])
    for name in others:
        effect = _OF_NCCL.get(name, "a setting that the library itself reads")
        if not name.startswith("GLOO_") and in_use == "gloo":
            effect = f"no effect: the collectives run over gloo ({effect})"
        rows.append((name, values[name], f"{effect}; set by the environment"))
    return rows


def _scheduler(name: str) -> str:
    return "SLURM" if name.startswith("SLURM_") else "the environment"


def _setter(values: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in values:
        return "torchrun"
    return "--nproc" if values.get(SPAWNED) else "the environment"


def _refuse_partial(values: Mapping[str, str]) -> None:
    missing = [name for name in _REQUIRED if not values.get(name)]
    if not missing:
        return
    present = [f"{name}={values[name]}" for name in (*_REQUIRED, "LOCAL_RANK") if values.get(name)]
    raise PreflightError(
        code="launch.partial_environment",
        what=f"{', '.join(present)} set, but {', '.join(missing)} missing",
        where="environment of this process",
        why="MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE together say which rank this is: torchrun sets all four, "
        "and without any of them the run is a single process",
        do="export " + " ".join(f"{name}={_EXAMPLES[name]}" for name in missing),
    )


def _refuse_out_of_range(rank: int, world_size: int, setter: str) -> None:
    if world_size >= 1 and 0 <= rank < world_size:
        return
    raise PreflightError(
        code="launch.rank_out_of_range",
        what=f"RANK = {rank}, WORLD_SIZE = {world_size}",
        where=f"RANK and WORLD_SIZE ({setter})",
        why="ranks count from 0 to WORLD_SIZE - 1" if world_size >= 1 else "WORLD_SIZE counts processes: at least 1",
        do=f"export WORLD_SIZE={max(rank, 0) + 1}",
    )


def _local_rank(values: Mapping[str, str], rank: int, num_local_devices: int) -> tuple[int, str]:
    if values.get("LOCAL_RANK"):
        return _integer(values, "LOCAL_RANK"), f"LOCAL_RANK ({_setter(values)})"
    if values.get("LOCAL_WORLD_SIZE"):
        return rank % max(_integer(values, "LOCAL_WORLD_SIZE"), 1), "RANK modulo LOCAL_WORLD_SIZE"
    if num_local_devices > 0:
        return rank % num_local_devices, f"RANK modulo {num_local_devices} local devices"
    return rank, "RANK"


def _node_rank(values: Mapping[str, str]) -> tuple[int, str]:
    for name in ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID"):  # GROUP_RANK is torchrun's
        if values.get(name):
            return _integer(values, name), f"{name} ({'torchrun' if name == 'GROUP_RANK' else _scheduler(name)})"
    return 0, "default"


def _integer(values: Mapping[str, str], name: str) -> int:
    text = values[name]
    if not (text.isascii() and text.strip().removeprefix("-").isdigit()):
        raise _bad_value(name, text, "an integer", f"export {name}={_EXAMPLES.get(name, '0')}")
    return int(text)


def _bad_value(name: str, text: str, allowed: str, remedy: str) -> PreflightError:
    return PreflightError(
        code="launch.bad_value",
        what=f"{name} = {text!r}",
        where=f"{name} (environment)",
        why=f"{name} must be {allowed}",
        do=remedy,
    )
