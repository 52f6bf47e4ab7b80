"""Rows whose loss is not finite: named and set aside; beyond the budget a run goes back to its checkpoint, or stops."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.compare import differing_tensors, final_checkpoint, read_rows, state_records
from support.references import KILLED
from support.runs import ForkServer, Prelude
from support.setup import TinyTask
from torch import Tensor

pytestmark = pytest.mark.xdist_group("faults")

NUMERICS = 7
RL = ("--max_steps", "5", "--save_steps", "2", "--eval_steps", "0", "--rollout_log_interval", "1")
CRITIC = (*RL, "--advantage_estimator", "gae")
SFT = ("--max_steps", "8", "--save_steps", "3", "--eval_steps", "0")
COUNTS = {"policy/rows_set_aside", "policy/rows_left_out"}


def bad_rows(*numbers: int, part: str = "policy") -> list[Prelude]:
    return [("spoil_rows", [part, list(numbers)])]


def named(run: Path) -> list[str]:
    """The samples that numerics.jsonl names."""
    rows = read_rows(run / "numerics.jsonl")
    return [name for row in rows for fault in row["faults"] for name in fault["samples"]]


def saved(run: Path) -> dict[str, Tensor]:
    """Every tensor of the final checkpoint."""
    files = sorted(final_checkpoint(run).rglob("*.safetensors"))
    return {f"{file.name}: {name}": tensor for file in files for name, tensor in load_file(file).items()}


def differing(expected: Path, run: Path) -> list[str]:
    """What differs between two finished runs to the bit, the guards' own counts apart."""
    assert final_checkpoint(expected).name == final_checkpoint(run).name
    states = [state_records(each) for each in (expected, run)]
    for state in states:
        for part in ("guards", "rollbacks"):
            state["progress"].pop(part, None)
    rows = [read_rows(each / "metrics.jsonl") for each in (expected, run)]
    kept = [[{name: row[name] for name in row.keys() - COUNTS} for row in each] for each in rows]
    return [
        *differing_tensors(saved(expected), saved(run)),
        *(name for name in states[0] if states[0][name] != states[1].get(name)),
        *(f"step {a['step']}" for a, b in zip(*kept, strict=True) if a != b),
    ]


@pytest.mark.parametrize(
    ("variant", "flags", "part", "count"),
    [("rl", CRITIC, "critic", 4), ("rl", RL, "policy", 4), ("sft", SFT, "policy", 1)],
    ids=["critic", "rl", "sft"],
)
def test_a_row_whose_loss_is_nan_is_named_and_set_aside_and_the_run_finishes(
    server: ForkServer, task: TinyTask, runs: Path, variant: str, flags: tuple[str, ...], part: str, count: int
) -> None:
    run = runs / "run"
    server.must_finish(*task.words(variant, run, *flags), preludes=bad_rows(3, part=part))
    assert len(named(run)) == count
    assert all("train:3" in name for name in named(run))
    rows = read_rows(run / "numerics.jsonl")
    assert {(row["part"], fault["stage"]) for row in rows for fault in row["faults"]} == {(part, "loss")}
    metrics = read_rows(run / "metrics.jsonl")
    assert metrics[-1][f"{part}/rows_set_aside"] == count
    assert metrics[-1]["step"] == int(flags[1])


BEYOND = {
    "sft": ("sft", (*SFT, "--max_rows_set_aside", "1"), 1),
    "rl": ("rl", (*RL, "--max_rows_set_aside", "3"), 1),
    "sft on two ranks": ("sft", (*SFT, "--max_rows_set_aside", "1"), 2),
    "a critic": ("rl", (*CRITIC, "--max_rows_set_aside", "3"), 1),
    "averages": ("rl", (*RL, "--max_rows_set_aside", "3", "--enable_ema"), 1),
    "rollouts ahead": (
        "rl",
        (*RL, "--max_rows_set_aside", "3", "--max_staleness", "1", "--async_deterministic"),
        1,
    ),
    "adapters": ("rl", (*RL, "--max_rows_set_aside", "3", "--lora_rank", "4", "--lr_factors="), 1),
    "fsdp": ("rl", (*RL, "--max_rows_set_aside", "3", "--fsdp"), 2),
    "zero 3": ("rl", (*RL, "--max_rows_set_aside", "3", "--zero_stage", "3"), 2),
    "parts of every matrix": ("rl", (*RL, "--max_rows_set_aside", "3", "--tp_size", "2"), 2),
}


@pytest.mark.parametrize("case", BEYOND)
def test_beyond_its_budget_a_run_goes_back_and_ends_as_one_that_was_resumed_by_hand_without_the_rows(
    server: ForkServer, task: TinyTask, runs: Path, case: str
) -> None:
    variant, flags, num_ranks = BEYOND[case]
    by_hand, run, bad = runs / "by_hand", runs / "run", bad_rows(3, 4)
    ended = server.run(*task.words(variant, by_hand, *flags, "--max_rollbacks", "0"), preludes=bad, num_ranks=num_ranks)
    assert ended.code == NUMERICS, ended.output[-3000:]
    server.must_finish("resume", str(by_hand), "--max_rows_set_aside", "16", preludes=bad, num_ranks=num_ranks)
    server.must_finish(*task.words(variant, run, *flags), preludes=bad, num_ranks=num_ranks)
    rollbacks = state_records(run)["progress"]["rollbacks"]
    assert len(rollbacks) == len(set(rollbacks)) >= 1
    assert differing(by_hand, run) == []
    assert sum("rollback" in row["what"] for row in read_rows(run / "numerics.jsonl")) == len(rollbacks)


def test_without_async_deterministic_a_run_with_rollouts_ahead_goes_back_and_finishes_without_the_rows(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    flags, run = ("--max_rows_set_aside", "3", "--max_staleness", "1"), runs / "run"
    server.must_finish(*task.words("rl", run, *RL, *flags), preludes=bad_rows(3, 4))
    progress = state_records(run)["progress"]
    left_out = progress["guards"]["policy"]["left_out"]
    assert progress["step"] == int(RL[1])
    assert len(progress["rollbacks"]) == 2
    assert {name.split("#")[0].rpartition("/")[2] for name in left_out} == {"train:3", "train:4"}
    assert len(left_out) == 8


def test_a_run_that_is_killed_after_it_went_back_has_the_rows_left_out_when_it_is_resumed(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    variant, flags, _ = BEYOND["sft"]
    whole, run, bad = runs / "whole", runs / "run", bad_rows(3, 4)
    server.must_finish(*task.words(variant, whole, *flags), preludes=bad)
    failed = state_records(whole)["progress"]["rollbacks"][0]
    killed: Prelude = ("signal_at", ["sft.logged", failed, "SIGKILL"])
    ended = server.run(*task.words(variant, run, *flags), preludes=[*bad, killed])
    assert ended.code == KILLED
    assert "rollback 1 of 2" in ended.output
    ended = server.must_finish("resume", str(run), preludes=bad)
    assert "rollback" not in ended.output
    assert differing(whole, run) == []


def test_a_run_that_may_not_go_back_again_stops_and_its_remedy_finishes_it(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    variant, flags, _ = BEYOND["rl"]
    run, bad = runs / "run", bad_rows(3, 4, 5, 6)
    ended = server.run(*task.words(variant, run, *flags, "--max_rollbacks", "1"), preludes=bad)
    assert ended.code == NUMERICS, ended.output[-3000:]
    assert "rollback 1 of 1" in ended.output
    remedy = next(line for line in ended.output.splitlines() if "rft-train resume" in line)
    words: list[Any] = shlex.split(remedy[remedy.index("rft-train resume") :])[1:]
    assert words[:2] == ["resume", str(run)]
    server.must_finish(*words, preludes=bad)
