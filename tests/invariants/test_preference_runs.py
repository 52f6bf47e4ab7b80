"""Runs on preferences over ranks: the steps of one process, whatever way the weights lie, and killed runs go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.compare import differences, final_checkpoint, read_rows, relative_distance
from support.references import References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask
from torch import Tensor

pytestmark = pytest.mark.xdist_group("invariants")

FLAGS = ("--max_steps", "4", "--eval_steps", "2")
STRATEGIES = {
    "replicas": (),
    "fsdp": ("--fsdp",),
    "zero 2": ("--zero_stage", "2"),
    "zero 3": ("--zero_stage", "3"),
    "shared sequences": ("--sp_size", "2"),
    "parts of every matrix": ("--tp_size", "2"),
}


def update(task: TinyTask, run: Path) -> list[Tensor]:
    """What training added to each weight, by name."""
    before, after = load_file(task.model / "model.safetensors"), dict[str, Tensor]()
    for file in sorted((final_checkpoint(run) / "model").glob("*.safetensors")):
        after |= load_file(file)
    return [after[name] - before[name] for name in sorted(before)]


@pytest.mark.parametrize(
    ("variant", "strategy"), [*(("dpo", name) for name in STRATEGIES), ("kto", "replicas"), ("kto", "fsdp")]
)
def test_two_ranks_take_the_steps_of_one_process(
    server: ForkServer, task: TinyTask, references: References, runs: Path, variant: str, strategy: str
) -> None:
    one = references.run(variant, *FLAGS)
    server.must_finish(*task.words(variant, runs / "run", *FLAGS, *STRATEGIES[strategy]), num_ranks=2)
    for file in ("metrics.jsonl", "evals.jsonl"):
        rows, others = read_rows(runs / "run" / file), read_rows(one / file)
        assert len(rows) == len(others)
        for row, other in zip(rows, others, strict=True):
            for name in other.keys() - {"policy/micro_batches", "correct"}:
                assert row[name] == pytest.approx(other[name], rel=2e-4, abs=5e-6), f"step {row['step']} {name}"
    assert relative_distance(update(task, runs / "run"), update(task, one)) < 1e-3


def test_no_size_of_micro_batches_changes_a_run(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    one = references.run("dpo", *FLAGS)
    server.must_finish(*task.words("dpo", runs / "run", *FLAGS, "--micro_train_batch_size", "1"))
    assert relative_distance(update(task, runs / "run"), update(task, one)) < 1e-3
    rows, others = read_rows(runs / "run" / "metrics.jsonl"), read_rows(one / "metrics.jsonl")
    assert [row["dpo/loss"] for row in rows] == pytest.approx([row["dpo/loss"] for row in others], rel=1e-6)


@pytest.mark.parametrize("point", ["dpo.logged", "checkpoint.publish.before"])
def test_a_killed_run_goes_on_to_the_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path, point: str
) -> None:
    restarts = Restarts(server, task.words("dpo", runs / "run"), runs / "run")
    killed = restarts.start([("signal_at", [point, 3, "SIGKILL"])]).wait()
    assert killed.code == -9
    restarts.finish()
    assert differences(references.run("dpo"), runs / "run") == []
