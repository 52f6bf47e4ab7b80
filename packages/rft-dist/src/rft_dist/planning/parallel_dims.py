"""Parallel dimensions: resolve nodes, GPUs and ranks to one rank grid, for `plan` and the real start alike.

A run has `nodes x ranks a node` ranks, which are `dp x sp x tp`: data, sequence and tensor parallel. Ranks
of one tensor group stand next to one another, then those of one sequence group, so that what talks most
stays within a machine. Batches count over all ranks, so every grid has the same global batch; what changes
is the share of a rank and its number of micro-batches. No torch is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from rft_core.errors import OptionsError, PreflightError

Launcher = Literal["plan", "torchrun", "srun", "--nproc", "by hand"]


@dataclass(frozen=True, slots=True)
class SourcedNumber:
    """A count and where it was written: a variable, a flag, or file:line."""

    value: int
    origin: str

    def __str__(self) -> str:
        # an origin that ends with a bracket, as "WORLD_SIZE (torchrun)", would leave two of them
        name, _, source = self.origin.removesuffix(")").partition(" (")
        is_bracketed = source and self.origin.endswith(")")
        return f"{self.value} ({f'{name} of {source}' if is_bracketed else self.origin})"


@dataclass(frozen=True, slots=True)
class BatchShare:
    """A batch over all ranks, cut into micro-batches on each."""

    name: str
    """The setting, such as train_batch_size."""
    size: int
    """Samples over all ranks."""
    micro: int
    """Samples of one forward on one rank."""

    def of(self, dp_size: int) -> tuple[int, int]:
        """(samples of a rank at most, its micro-batches): ceil(size / dp), ceil of that / micro.

        Example: `BatchShare("train_batch_size", 128, 8).of(16)` is (8, 1).
        """
        samples = -(-self.size // dp_size)
        return samples, -(-samples // self.micro)


@dataclass(frozen=True, slots=True)
class RequestedDims:
    """Requested dimensions of a rank grid; None where a number was not given."""

    ranks: SourcedNumber | None = None
    nodes: SourcedNumber | None = None
    per_node: SourcedNumber | None = None
    devices: SourcedNumber | None = None
    """GPUs of this machine; None on a CPU, or where ranks may share one."""
    sp_size: SourcedNumber = SourcedNumber(1, "default")
    tp_size: SourcedNumber = SourcedNumber(1, "default")
    share: BatchShare | None = None
    launcher: Launcher = "by hand"


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Every rank's place. Example: 2 nodes of 8 ranks with tp_size 2 are `ParallelDims(2, 8, 1, 2)`, 8 x 1 x 2."""

    num_nodes: int
    ranks_per_node: int
    sp_size: int = 1
    tp_size: int = 1
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    """ranks, nodes, per_node -> where the number came from."""
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.num_nodes * self.ranks_per_node

    @property
    def dp_size(self) -> int:
        """Ranks that take different samples."""
        return self.world_size // (self.sp_size * self.tp_size)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(dp, sp, tp) of a rank; tp runs fastest."""
        rest, tp = divmod(rank, self.tp_size)
        dp, sp = divmod(rest, self.sp_size)
        return dp, sp, tp


def resolve_grid(requested: RequestedDims) -> ParallelDims:
    """The grid of these numbers; any two of ranks, nodes and ranks a node give the third.

    Raises:
        PreflightError: they contradict one another, the GPUs, or the parallel sizes; with all numbers, their
            origins and the nearest grids of the same global batch.
    """
    for number in (requested.ranks, requested.nodes, requested.per_node, requested.sp_size, requested.tp_size):
        if number is not None and number.value < 1:
            raise _refusal(requested, "launch.not_positive", f"{number} is a count and must be at least 1")
    nodes, per_node = _completed(requested)
    _check_product(requested, nodes, per_node)
    _check_devices(requested, nodes, per_node)
    _check_parallel(requested, nodes, per_node)
    return ParallelDims(
        nodes,
        per_node,
        requested.sp_size.value,
        requested.tp_size.value,
        _origins(requested),
        _notes(requested, per_node),
    )


def layouts(requested: RequestedDims) -> list[tuple[int, int]]:
    """(nodes, ranks a node) that can be run, those nearest to what was written first.

    Each keeps one or two of the written numbers. Nearest: no more nodes than the numbers say, as nobody knows whether
    there are others, then least change in ranks, then in nodes.
    """
    ranks, nodes, per_node = (n.value if n else None for n in (requested.ranks, requested.nodes, requested.per_node))
    limit = requested.devices.value if requested.devices else 0
    tp_size = max(1, requested.tp_size.value)
    group = _group_size(requested)
    most = max(1, limit or per_node or (ranks or 1))
    grids: set[tuple[int, int]] = set()
    for count in _node_counts(ranks, nodes, per_node, most):
        # ranks a node in steps of this: tensor groups fit on one machine, and all nodes together hold whole groups
        unit = math.lcm(tp_size, group // math.gcd(group, count))
        near = (ranks or (nodes or 1) * most) / count
        below, above = math.floor(near / unit) * unit, math.ceil(near / unit) * unit
        sizes = {below, above, most // unit * unit, per_node or 0, unit}
        grids |= {(count, size) for size in sizes if size > 0}
    valid = [grid for grid in grids if _is_valid(grid, limit, group, tp_size)]
    target, machines = ranks or (nodes or 1) * most, nodes or 1
    there = nodes or _implied_nodes(ranks, per_node)
    return sorted(
        valid,
        key=lambda grid: (
            bool(there) and grid[0] > there,
            abs(grid[0] * grid[1] - target),
            abs(grid[0] - machines),
            grid,
        ),
    )


def _implied_nodes(ranks: int | None, per_node: int | None) -> int:
    """Nodes that follow from the ranks and the ranks a node; 0 where they do not say."""
    return ranks // per_node if ranks and per_node and ranks % per_node == 0 else 0


def _group_size(requested: RequestedDims) -> int:
    """Ranks that compute every sample together; sizes that are refused because they are no counts are taken for 1."""
    return max(1, requested.sp_size.value) * max(1, requested.tp_size.value)


def _node_counts(ranks: int | None, nodes: int | None, per_node: int | None, most: int) -> list[int]:
    """Numbers of machines worth offering: as written, next to it where that divides, or what the ranks need."""
    counts = {nodes or 0, 1}
    if ranks:
        counts |= {-(-ranks // most), ranks // per_node if per_node else 0}
        counts |= {count for count in ((nodes or 0) - 1, (nodes or 0) + 1) if count > 0 and ranks % count == 0}
    return sorted(count for count in counts if count > 0)


def _is_valid(grid: tuple[int, int], limit: int, group: int, tp_size: int) -> bool:
    nodes, per_node = grid
    fits = not limit or per_node <= limit
    return fits and (nodes * per_node) % group == 0 and per_node % tp_size == 0


def _completed(requested: RequestedDims) -> tuple[int, int]:
    """Nodes and ranks a node; what is not written follows from the rest."""
    ranks, nodes, per_node = requested.ranks, requested.nodes, requested.per_node
    if nodes is not None and per_node is not None:
        return nodes.value, per_node.value
    if ranks is None:
        return (nodes.value if nodes else 1), (per_node.value if per_node else 1)
    if nodes is not None:
        if ranks.value % nodes.value:
            raise _refusal(
                requested,
                "launch.layout",
                f"{_counted(ranks.value, 'rank')} cannot be divided evenly among {nodes.value} nodes",
            )
        return nodes.value, ranks.value // nodes.value
    size = per_node or requested.devices
    # nothing says how many machines there are: ranks that fit on one are taken to be on one
    if size is None or ranks.value <= size.value:
        return 1, ranks.value if per_node is None else per_node.value
    if size.value < 1 or ranks.value % size.value:
        raise _refusal(requested, "launch.layout", f"{_multiple(ranks.value, '')} of {size.value} a node")
    return ranks.value // size.value, size.value


def _check_product(requested: RequestedDims, nodes: int, per_node: int) -> None:
    if requested.ranks is not None and nodes * per_node != requested.ranks.value:
        message = f"{nodes} x {per_node} = {_counted(nodes * per_node, 'rank')}, not {requested.ranks.value}"
        raise _refusal(requested, "launch.layout", message)


def _check_devices(requested: RequestedDims, nodes: int, per_node: int) -> None:
    if requested.devices is not None and per_node > requested.devices.value:
        gpus = _counted(requested.devices.value, "GPU")
        message = f"{_counted(per_node, 'rank')} a node on {gpus}: every rank needs one of its own"
        raise _refusal(requested, "launch.too_few_devices", message)


def _check_parallel(requested: RequestedDims, nodes: int, per_node: int) -> None:
    sp, tp = requested.sp_size, requested.tp_size
    if (nodes * per_node) % (sp.value * tp.value):
        message = f"{_multiple(nodes * per_node, '')} of sp_size {sp} x tp_size {tp} = {sp.value * tp.value}"
        raise _refusal(requested, "launch.parallel_sizes", message)
    if per_node % tp.value:
        message = f"{_multiple(per_node, ' a node')} of tp_size {tp}: a tensor group stays on one machine"
        raise _refusal(requested, "launch.parallel_sizes", message)


def _refusal(requested: RequestedDims, code: str, message: str) -> PreflightError:
    offered = layouts(requested)[:3]
    near = "; ".join(_described(requested, grid) for grid in offered)
    return PreflightError(
        code=code,
        what=f"{message}: {_numbers(requested)}",
        where=_where(requested),
        why="ranks = nodes x ranks a node, each on a GPU of its own where there are GPUs"
        + (f"; with the same global batch: {near}" if near else ""),
        do=_remedy(requested, offered[0]) if offered else "make the parallel sizes smaller",
    )


def _remedy(requested: RequestedDims, grid: tuple[int, int]) -> str:
    """The command of a grid that can be; in a plan it replaces the ranks a node that are written, too."""
    command = _command(_launcher(requested, grid), grid)
    per_node = requested.per_node
    if requested.launcher != "plan" or per_node is None:
        return command
    if per_node.origin.startswith("nproc"):
        return f"{command} --nproc {grid[1]}"
    return command if per_node.value == grid[1] else f"{command} --gpus_per_node {grid[1]}"


def _where(requested: RequestedDims) -> str:
    """The origins of what was asked for; that of one process, which nobody asks for, stands for nothing else."""
    sizes = [size.origin for size in (requested.sp_size, requested.tp_size) if size.value > 1]
    written = [origin for origin in dict.fromkeys([*sizes, *_origins(requested).values()]) if origin != "default"]
    return ", ".join(written) or "command line"


def _launcher(requested: RequestedDims, grid: tuple[int, int]) -> Launcher:
    """Who is to start the ranks: of one process that nobody started as a rank, the command itself can."""
    is_single_process = requested.launcher == "by hand" and requested.ranks is not None and requested.ranks.value == 1
    return "--nproc" if is_single_process and grid[0] == 1 else requested.launcher


def _numbers(requested: RequestedDims) -> str:
    """Ranks, nodes and GPUs, each with its origin."""
    per_node = [("ranks a node", requested.per_node)] if requested.per_node else []
    rows = [("ranks", requested.ranks), ("nodes", requested.nodes), *per_node, ("GPUs a node", requested.devices)]
    return ", ".join(f"{name} = {number if number is not None else 'not given'}" for name, number in rows)


def _described(requested: RequestedDims, grid: tuple[int, int]) -> str:
    ranks = grid[0] * grid[1]
    message = f"{grid[0]} x {grid[1]} = {_counted(ranks, 'rank')}"
    if requested.share is None:
        return message
    samples, accumulation = requested.share.of(ranks // _group_size(requested))
    parts = _counted(accumulation, "micro-batch", "micro-batches")
    return f"{message} ({samples} of {requested.share.size} samples each, in {parts})"


def _multiple(ranks: int, place: str) -> str:
    return f"{_counted(ranks, 'rank')}{place} {'is' if ranks == 1 else 'are'} not a multiple"


def _counted(number: int, one: str, many: str = "") -> str:
    return f"1 {one}" if number == 1 else f"{number} {many or f'{one}s'}"


def _command(launcher: Launcher, grid: tuple[int, int]) -> str:
    nodes, per_node = grid
    return {
        "plan": f"--nodes {nodes} --world_size {nodes * per_node}",
        "torchrun": f"torchrun --nnodes={nodes} --nproc_per_node={per_node} ...",
        "srun": f"srun -N{nodes} --ntasks-per-node={per_node} ...",
        "--nproc": f"--nproc {per_node}",
        "by hand": f"export WORLD_SIZE={nodes * per_node} NUM_NODES={nodes} GPUS_PER_NODE={per_node}",
    }[launcher]


def _origins(requested: RequestedDims) -> dict[str, str]:
    rows = {
        "ranks": requested.ranks,
        "nodes": requested.nodes,
        "per_node": requested.per_node,
        "devices": requested.devices,
    }
    return {name: number.origin for name, number in rows.items() if number is not None}


def _notes(requested: RequestedDims, per_node: int) -> tuple[str, ...]:
    if requested.devices is not None and per_node < requested.devices.value:
        idle = requested.devices.value - per_node
        return (f"{idle} of {requested.devices.value} GPUs of a node stay idle ({requested.devices.origin})",)
    return ()


class GroupNames(TypedDict):
    """The words of an error for a group of ranks."""

    flag: str
    """The setting of its size."""
    code: str
    what: str
    """What its ranks share."""


EXPERTS: GroupNames = {"flag": "ep_size", "code": "expert.ep_size", "what": "experts"}


def refuse_uneven_group(size: int, world_size: int, *, flag: str, code: str, what: str) -> None:
    """Raise OptionsError where groups of `size` ranks do not divide all ranks; the names as of `GroupNames`."""
    if size >= 1 and world_size % size == 0:
        return
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    raise OptionsError(
        code=code,
        what=f"{flag} = {size}, {_counted(world_size, 'rank')}",
        where=f"--{flag}",
        why=f"ranks share {what} in equal groups; allowed: {', '.join(map(str, divisors))}",
        do=f"--{flag} {min(divisors, key=lambda number: abs(number - size))}",
    )
