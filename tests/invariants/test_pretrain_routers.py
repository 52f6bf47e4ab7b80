"""Pre-training a mixture of experts: a skew of its routers is balanced, and loads are those of the whole step."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from support.compare import read_rows
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("invariants")

EXPERTS = (
    "--dropout",
    "0",
    "--use_moe",
    "--family",
    "dots1",
    "--num_experts",
    "8",
    "--top_k",
    "2",
    "--shared_experts",
    "1",
)
FEW = ("--eval_steps", "0", "--save_steps", "0", "--patience", "0", "--micro_train_batch_size", "32")


def skewed(server: ForkServer, task: TinyTask, run: Path, *more: str) -> tuple[list[float], float]:
    """(MaxVio over the layers of each step, held-out loss at the end) where the routers' inputs prefer some."""
    steps = ("--max_steps", "150", "--max_epochs", "999", "--train_batch_size", "24")
    words = task.words("pretrain", run, *EXPERTS, *FEW, *steps, *more)
    server.must_finish(*words, preludes=[("skew_routers", [1.0])])
    found = [row["router/max_violation"] for row in read_rows(run / "metrics.jsonl")]
    return found, read_rows(run / "evals.jsonl")[-1]["eval/loss"]


def test_a_skew_that_does_not_go_away_is_balanced_by_the_bias_and_not_without_it(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    without, loss_without = skewed(server, task, runs / "without")
    balanced, loss = skewed(server, task, runs / "balanced", "--balance_bias_rate", "0.01")
    assert min(without) > 1.0
    assert balanced[0] > 1.0
    assert fmean(balanced[-10:]) < 0.3
    assert loss <= loss_without


@pytest.mark.parametrize("layer", [0, 2])
def test_one_router_of_four_that_collapsed_is_named_within_twenty_steps(
    server: ForkServer, task: TinyTask, runs: Path, layer: int
) -> None:
    words = task.words("pretrain", runs / "run", *EXPERTS, *FEW, "--max_steps", "20", "--num_layers", "4")
    server.must_finish(*words, "--max_epochs", "20", preludes=[("skew_routers", [20.0, layer, 4])])
    (alarm,) = json.loads((runs / "run" / "summary.json").read_text())["health"]
    assert (alarm["name"], alarm["step"]) == ("router_collapse", 10)
    assert alarm["what"].startswith(f"most tokens go to few experts of layer {layer}: ")
    last = read_rows(runs / "run" / "metrics.jsonl")[-1]
    assert last["router/entropy"] > 0.5, "the mean over the layers hides it"


def test_loads_of_two_ranks_are_those_of_one_with_two_micro_batches(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    # a rate that changes no route: then the counts are the same numbers in every step
    words = (*EXPERTS, *FEW[:-2], "--max_steps", "3", "--train_batch_size", "6", "--learning_rate", "1e-12")
    server.must_finish(*task.words("pretrain", runs / "one", *words, "--micro_train_batch_size", "3"))
    server.must_finish(*task.words("pretrain", runs / "two", *words, "--micro_train_batch_size", "6"), num_ranks=2)
    rows, others = (read_rows(runs / name / "metrics.jsonl") for name in ("one", "two"))
    assert [row["policy/micro_batches"] for row in rows] == [2, 2, 2]
    names = ("router/max_violation", "router/max_violation_worst", "router/dead_experts", "router/entropy")
    for row, other in zip(rows, others, strict=True):
        assert [row[name] for name in names] == [other[name] for name in names]


@pytest.mark.parametrize("model", [(), EXPERTS], ids=["dense", "experts"])
def test_a_forward_and_backward_reads_no_more_tensors_on_the_host_than_it_did(
    server: ForkServer, task: TinyTask, runs: Path, model: tuple[str, ...]
) -> None:
    words = task.words("pretrain", runs / "run", "--dropout", "0", *model, *FEW, "--max_steps", "3")
    server.must_finish(*words, preludes=[("count_host_reads", [str(runs / "reads.txt")])])
    reads = (runs / "reads.txt").read_text().split()
    assert len(reads) >= 3
    # a ceiling, which may only fall: none at all is what it should be
    assert max(map(int, reads)) <= 7
