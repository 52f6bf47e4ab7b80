"""Runs that end with their best weights where the ranks divide the weights: those of one process, also when resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.compare import final_checkpoint, read_rows
from support.references import SAVED_AFTER_SIGNAL, References
from support.runs import ForkServer
from support.setup import TinyTask
from torch import Tensor

from rft_dist.checkpoints.reader import open_verified

pytestmark = pytest.mark.xdist_group("invariants")

# a step that is too long: the loss falls in the second step, and not in the two after it. A large epsilon, since
# moments of gradients near 0 would turn sums in another order into steps in another direction
FLAGS = ("--patience", "2", "--eval_steps", "1", "--lr_schedule", "constant")
FLAGS = (*FLAGS, "--learning_rate", "0.1", "--adam_epsilon", "0.01", "--max_epochs", "4", "--l2", "0", "--lr_factors=")
BEST, LAST = 2, 4
STRATEGIES: dict[str, tuple[str, ...]] = {
    "fsdp": ("--fsdp",),
    "zero 2": ("--zero_stage", "2"),
    "parts": ("--tp_size", "2"),
}
RESUMED: dict[str, tuple[str, ...]] = {
    "fsdp": ("--fsdp",),
    "zero 1": ("--zero_stage", "1"),
    "zero 3": ("--zero_stage", "3"),
    "parts in blocks": ("--tp_size", "2", "--fsdp"),
}
CHANGES: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "fsdp to one process": (("--fsdp",), ("--no-fsdp",), 1),
    "zero 2 to parts": (("--zero_stage", "2"), ("--zero_stage", "0", "--tp_size", "2"), 2),
    "replicas to zero 3": ((), ("--zero_stage", "3"), 2),
}


COPIES: dict[str, tuple[str, ...]] = {"replicas": (), "zero 2": STRATEGIES["zero 2"], "parts": STRATEGIES["parts"]}


def words(task: TinyTask, run: Path, *more: str) -> list[str]:
    return task.words("sft", run, "--pretrain", str(task.folder / "untrained"), *FLAGS, *more)


def weights(run: Path) -> dict[str, Tensor]:
    """Of the final checkpoint, from as many files as wrote them."""
    found: dict[str, Tensor] = {}
    for file in sorted((final_checkpoint(run) / "model").glob("*.safetensors")):
        found |= load_file(file)
    return found


def losses(run: Path) -> dict[str, float]:
    return {row["name"]: row["eval/loss"] for row in read_rows(run / "evals.jsonl")}


def compare(found: Path, one: Path) -> None:
    ours, theirs = weights(found), weights(one)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-6
    assert losses(found) == pytest.approx(losses(one), rel=1e-5)
    assert _last(found)["eval/best_step"] == _last(one)["eval/best_step"]


def _last(run: Path) -> dict[str, Any]:
    return read_rows(run / "evals.jsonl")[-1]


@pytest.fixture(scope="module")
def one(server: ForkServer, task: TinyTask, references: References) -> Path:
    """The run of one process."""
    path = references.folder / "best_of_one"
    server.must_finish(*words(task, path))
    assert _last(path)["name"] == "after"
    assert _last(path)["eval/best_step"] == BEST
    assert [row["step"] for row in read_rows(path / "metrics.jsonl")][-1] == LAST
    assert losses(path)["after"] == losses(path)[f"step {BEST}"]
    return path


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_end_with_the_best_weights_of_one_process(
    server: ForkServer, task: TinyTask, one: Path, runs: Path, strategy: str
) -> None:
    server.must_finish(*words(task, runs / "run", *STRATEGIES[strategy]), num_ranks=2)
    compare(runs / "run", one)


@pytest.mark.parametrize("strategy", RESUMED)
def test_a_resume_after_the_best_step_ends_with_its_weights(
    server: ForkServer, task: TinyTask, one: Path, runs: Path, strategy: str
) -> None:
    stop = [("signal_rank_at", [1, "sft.logged", BEST + 1, "SIGTERM"])]
    stopped = server.run(*words(task, runs / "run", *RESUMED[strategy]), preludes=stop, num_ranks=2)
    assert (stopped.code, *stopped.other_codes) == (SAVED_AFTER_SIGNAL,) * 2, stopped.output[-3000:]
    assert final_checkpoint(runs / "run").name == f"step_{BEST + 1:06d}", "after the best step"
    server.must_finish("resume", str(runs / "run"), num_ranks=2)
    compare(runs / "run", one)


@pytest.mark.parametrize("change", CHANGES)
def test_the_best_weights_go_on_under_another_strategy(
    server: ForkServer, task: TinyTask, one: Path, runs: Path, change: str
) -> None:
    begun, continued, num_ranks = CHANGES[change]
    stop = [("signal_rank_at", [1, "sft.logged", BEST + 1, "SIGTERM"])]
    stopped = server.run(*words(task, runs / "run", *begun), preludes=stop, num_ranks=2)
    assert (stopped.code, *stopped.other_codes) == (SAVED_AFTER_SIGNAL,) * 2, stopped.output[-3000:]
    server.must_finish("resume", str(runs / "run"), *continued, num_ranks=num_ranks)
    compare(runs / "run", one)


@pytest.mark.parametrize("strategy", COPIES)
def test_the_float32_copies_that_are_stepped_on_are_the_best_weights_too(
    server: ForkServer, task: TinyTask, runs: Path, strategy: str
) -> None:
    server.must_finish(*words(task, runs / "run", "--use_mp_opt", *COPIES[strategy]), num_ranks=2)
    assert _last(runs / "run")["eval/best_step"] < _last(runs / "run")["step"], "better weights were put back"
    checkpoint = open_verified(final_checkpoint(runs / "run"))
    state = checkpoint.component("optimizer").tensors()
    for name, tensor in weights(runs / "run").items():
        assert torch.equal(state[f"master/{name}"].to(tensor.dtype), tensor), name
