"""Sets of environment variables that contradict one another or this machine, refused before ranks meet.

No torch is imported here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from rft_core.errors import PreflightError
from rft_dist.launch.environment import RankInfo
from rft_dist.launch.slurm import task_of
from rft_dist.planning.parallel_dims import ParallelDims

Found = tuple[tuple[str, ...], str, str]
"""(variables, why they cannot all hold, the one thing to do)."""

_LOOPBACK = ("localhost", "ip6-localhost", "::1")


def refuse_contradictions(
    values: Mapping[str, str], ranks: RankInfo, grid: ParallelDims, interfaces: Collection[str]
) -> None:
    """Raise PreflightError for the first set that cannot work, naming each variable with its value."""
    for names, why, do in contradictions(values, ranks, grid, interfaces):
        raise PreflightError(
            code="launch.contradictory_environment",
            what=", ".join(f"{name}={values.get(name, '')}" for name in names),
            where=f"environment of rank {ranks.rank}",
            why=why,
            do=do,
        )


def contradictions(
    values: Mapping[str, str], ranks: RankInfo, grid: ParallelDims, interfaces: Collection[str]
) -> Iterator[Found]:
    """Every set that cannot work."""
    yield from _places(values, ranks)
    yield from _addresses(values, ranks, grid)
    if ranks.world_size > 1:  # one process exchanges nothing
        yield from _interfaces(values, interfaces)
    yield from _transports(values)
    yield from _old_names(values)


def _places(values: Mapping[str, str], ranks: RankInfo) -> Iterator[Found]:
    """Numbers of the rank that two variables give differently."""
    if not values.get("TORCHELASTIC_RUN_ID") and not values.get("RFT_NPROC") and task_of(values) is not None:
        pairs = [("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")]
        pairs += [("LOCAL_RANK", "SLURM_LOCALID"), ("NODE_RANK", "SLURM_NODEID")]
        for name, by_slurm in pairs:
            if values.get(name) and values.get(by_slurm) and values[name] != values[by_slurm]:
                yield (
                    (name, by_slurm),
                    "an exported value is the same in every task; srun numbers the tasks",
                    f"unset {name}",
                )
    local_size = _integer(values, "LOCAL_WORLD_SIZE")
    if local_size is not None and local_size > ranks.world_size:
        do = f"export LOCAL_WORLD_SIZE={ranks.world_size}"
        yield ("LOCAL_WORLD_SIZE", "WORLD_SIZE"), "a machine cannot have more ranks than the run", do
    if local_size is not None and ranks.local_rank >= local_size:
        why = "local ranks count from 0 to LOCAL_WORLD_SIZE - 1"
        yield ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), why, "unset LOCAL_RANK LOCAL_WORLD_SIZE"
    for name, counted in (("GPUS_PER_NODE", "LOCAL_WORLD_SIZE"), ("NUM_NODES", "GROUP_WORLD_SIZE")):
        if values.get(name) and values.get(counted) and values[name] != values[counted]:
            yield (name, counted), "the launcher started a different number than the one set", f"unset {name}"
    nodes = _integer(values, "NUM_NODES")
    if nodes is not None and ranks.node_rank >= nodes and ranks.world_size > 1:
        why = f"nodes count from 0 to NUM_NODES - 1, and this is node {ranks.node_rank}"
        yield ("NODE_RANK", "NUM_NODES"), why, f"export NUM_NODES={ranks.node_rank + 1}"


def _addresses(values: Mapping[str, str], ranks: RankInfo, grid: ParallelDims) -> Iterator[Found]:
    """Addresses that other machines cannot reach."""
    if ranks.world_size == 1 or grid.num_nodes == 1 or values.get("TORCHELASTIC_RUN_ID"):
        return  # torchrun's agents have met already, maybe as two of them on one machine
    if ranks.master_addr in _LOOPBACK or ranks.master_addr.startswith("127."):
        why = f"{grid.num_nodes} nodes cannot meet at a loopback address"
        yield ("MASTER_ADDR",), why, "export MASTER_ADDR=<address of the first node>"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if values.get(name, "").removeprefix("=").split(":")[0] == "lo":
            why = f"the loopback interface reaches no other machine, and there are {grid.num_nodes}"
            yield (name,), why, f"unset {name}"


def _interfaces(values: Mapping[str, str], here: Collection[str]) -> Iterator[Found]:
    """Interfaces that this machine does not have. NCCL takes beginnings of names, `=` exact ones and `^` others."""
    listed = ", ".join(sorted(here))
    wanted = values.get("NCCL_SOCKET_IFNAME", "")
    exact, names = wanted.startswith("="), [n.split(":")[0] for n in wanted.lstrip("=").split(",") if n]
    matches = any(name == n if exact else name.startswith(n) for name in here for n in names)
    if wanted and not wanted.startswith("^") and not matches:
        yield ("NCCL_SOCKET_IFNAME",), f"the interfaces of this machine are {listed}", "unset NCCL_SOCKET_IFNAME"
    absent = [n for n in values.get("GLOO_SOCKET_IFNAME", "").split(",") if n and n not in here]
    if absent:
        why = f"gloo needs the whole name; the interfaces of this machine are {listed}"
        yield ("GLOO_SOCKET_IFNAME",), why, "unset GLOO_SOCKET_IFNAME"


def _transports(values: Mapping[str, str]) -> Iterator[Found]:
    """A transport that is switched off and configured at once."""
    pairs = (
        ("NCCL_IB_DISABLE", "NCCL_IB_HCA", "InfiniBand is switched off, but one of its adapters is chosen"),
        ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "direct GPU access is switched off, but its level is set"),
        ("NCCL_NET_GDR_LEVEL", "NCCL_IB_DISABLE", "network cards reach GPU memory over InfiniBand, which is off"),
        ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "torch detects errors in only one of two ways"),
    )
    for first, second, why in pairs:
        off = "NCCL_IB_DISABLE" if first == "NCCL_NET_GDR_LEVEL" else first
        both = values.get(first) and values.get(second)
        if both and values[off] != "0" and (not second.endswith("HANDLING") or values[second] != "0"):
            yield (first, second), why, f"unset {off}"


def _old_names(values: Mapping[str, str]) -> Iterator[Found]:
    """A variable of torch under its old and its new name, with two values."""
    for name in ("BLOCKING_WAIT", "ASYNC_ERROR_HANDLING", "AVOID_RECORD_STREAMS"):
        old, new = f"NCCL_{name}", f"TORCH_NCCL_{name}"
        if values.get(old) and values.get(new) and values[old] != values[new]:
            yield (old, new), "the two are one variable of torch, under its old and its new name", f"unset {old}"


def _integer(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name, "")
    return int(text) if text.isdecimal() else None
