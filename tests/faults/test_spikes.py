"""Rows that make the gradient jump are named under every strategy: set aside with a limit, told without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.compare import read_rows
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

FLAGS = ("--max_steps", "30", "--max_epochs", "30", "--eval_steps", "0", "--save_steps", "30")
SPIKE = [("spoil_rows", ["policy", [3], 1e4, 20])]
"""Row 3 has ten thousand times its gradient from update 20 on."""
STRATEGIES = {
    "one rank": ("", 1),
    "two ranks": ("", 2),
    "fsdp": ("--fsdp", 2),
    "zero 1": ("--zero_stage 1", 2),
    "zero 2": ("--zero_stage 2", 2),
    "zero 3": ("--zero_stage 3", 2),
    "zero 1 in bfloat16": ("--zero_stage 1 --bf16", 2),
    "parts of every matrix": ("--tp_size 2", 2),
}


@pytest.mark.parametrize("case", STRATEGIES)
def test_a_row_that_makes_the_gradient_jump_is_set_aside(
    server: ForkServer, task: TinyTask, runs: Path, case: str
) -> None:
    (more, num_ranks), run = STRATEGIES[case], runs / "run"
    words = task.words("sft", run, *FLAGS, "--max_norm_spike", "20", *more.split())
    server.must_finish(*words, preludes=SPIKE, num_ranks=num_ranks)
    (row,) = read_rows(run / "numerics.jsonl")
    (fault,) = row["faults"]
    (name,) = fault["samples"]
    assert "train:3" in name
    assert fault["stage"].startswith("gradient of norm ")
    assert row["largest"][0]["samples"] == [name]
    metrics = read_rows(run / "metrics.jsonl")
    jumps = [each for each in metrics if "policy/largest_rows" in each]
    assert [each["policy/largest_rows"].split(" (norm ")[0] for each in jumps] == [name]
    assert jumps[0]["step"] == row["step"] >= 20
    assert (metrics[-1]["policy/rows_set_aside"], metrics[-1]["policy/spikes"]) == (1, 1)
    assert metrics[-1]["step"] == 30
    assert max(each["policy/gradient_norm"] for each in metrics) < 100, "no such gradient was applied"


@pytest.mark.parametrize("case", ["one rank", "fsdp"])
def test_without_a_limit_the_row_is_told_in_the_warning_and_the_run_is_the_same(
    server: ForkServer, task: TinyTask, runs: Path, case: str
) -> None:
    (more, num_ranks), run = STRATEGIES[case], runs / "run"
    server.must_finish(*task.words("sft", run, *FLAGS, *more.split()), preludes=SPIKE, num_ranks=num_ranks)
    rows = read_rows(run / "numerics.jsonl")
    assert "the step was applied" in rows[0]["what"]
    (name,) = rows[0]["largest"][0]["samples"]
    assert "train:3" in name
    found = {alarm["name"]: alarm for alarm in json.loads((run / "summary.json").read_text())["health"]}
    assert f"; the largest gradients are those of {name} (norm " in found["gradient_spike"]["what"]
    assert "policy/rows_set_aside" not in read_rows(run / "metrics.jsonl")[-1]
