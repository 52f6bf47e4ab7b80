"""What the plan says of the ranks of a run."""

from __future__ import annotations

from rft_cli.pages.run_plan_ranks import grid_lines, preflight_lines, share_line
from rft_dist.planning.parallel_dims import BatchShare, ParallelDims
from rft_dist.preflight.compare_ranks import Report
from rft_dist.preflight.run_preflight import PreflightReport


def test_the_grid_is_one_line_and_its_notes() -> None:
    grid = ParallelDims(2, 4, sp_size=2, tp_size=2, notes=("4 GPUs stay idle",))
    assert grid_lines(grid) == ["2 nodes x 4 = 8 ranks: data 2 x sequence 2 x tensor 2", "4 GPUs stay idle"]


def test_a_batch_that_leaves_ranks_without_a_sample_says_so() -> None:
    assert share_line(BatchShare("train_batch_size", 4, 8), 16).endswith("12 have none")


def test_files_of_one_machine_are_said_not_to_be_compared() -> None:
    compared = Report(num_ranks=2, num_nodes=1, num_facts=30, clock_seconds=0.001)
    grid, summary, files = preflight_lines(PreflightReport(ParallelDims(1, 2), compared, ""))
    assert grid.startswith("1 node x 2 = 2 ranks")
    assert "agree in 30 things; the run's folder is one and the same; clocks within 0.001 s" in summary
    assert files.startswith("one machine")
    assert preflight_lines(PreflightReport(ParallelDims(1, 1), None, "srun")) == ["srun"]
