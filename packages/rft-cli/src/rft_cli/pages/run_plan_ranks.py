"""Ranks' part of the plan pages: the grid, a rank's share of a batch, and what the ranks compared before they began."""

from __future__ import annotations

from rft_dist.planning.parallel_dims import BatchShare, ParallelDims
from rft_dist.preflight.run_preflight import PreflightReport


def grid_lines(grid: ParallelDims) -> list[str]:
    """Return nodes, ranks and parallel dimensions."""
    machines = f"{grid.num_nodes} {'node' if grid.num_nodes == 1 else 'nodes'}"
    ranks = f"{grid.world_size} {'rank' if grid.world_size == 1 else 'ranks'}"
    dims = f"data {grid.dp_size} x sequence {grid.sp_size} x tensor {grid.tp_size}"
    return [f"{machines} x {grid.ranks_per_node} = {ranks}: {dims}", *grid.notes]


def share_line(share: BatchShare, dp_size: int) -> str:
    """Return the arithmetic of a rank's share of a batch."""
    samples, accumulation = share.of(dp_size)
    uneven = "" if share.size % dp_size == 0 else " at most"
    idle = f"; {dp_size - share.size} have none" if share.size < dp_size else ""
    return (
        f"{share.name} {share.size:,} / {dp_size:,} = {samples:,} samples{uneven} a rank = "
        f"{accumulation:,} micro-batches of {min(share.micro, samples):,}{idle}"
    )


def preflight_lines(report: PreflightReport) -> list[str]:
    """Return the grid of several ranks, what they agree in, and notes."""
    lines = grid_lines(report.grid) if report.grid.world_size > 1 else []
    lines += [report.note] if report.note else []
    compared = report.comparison
    if compared is None:
        return lines
    nodes = "1 node" if compared.num_nodes == 1 else f"{compared.num_nodes} nodes"
    summary = f"{compared.num_ranks} ranks on {nodes} agree in {compared.num_facts} things; the run's folder is one and"
    lines += [f"{summary} the same; clocks within {compared.clock_seconds:.3f} s", *compared.notes]
    if report.grid.num_nodes == 1:
        lines.append("one machine: files of data are the same ones, and not compared")
    return lines
