"""A loop written by hand is the built-in one: the same weights after five steps, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.compare import read_rows
from support.custom_loops import NUM_STEPS, LoopTask, grpo, make_loop_task, run_on_ranks, sft
from support.runs import ForkServer
from torch import Tensor

from rft_cli.main import main

CLOSE = 1e-6
"""Largest difference of any weight, in float32, after five steps."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> LoopTask:
    return make_loop_task(tmp_path_factory.mktemp("loops"))


def weights(folder: Path) -> dict[str, Tensor]:
    # several files where the ranks wrote them together
    files = (folder / f"step_{NUM_STEPS:06d}" / "model").glob("*.safetensors")
    return {name: tensor for file in sorted(files) for name, tensor in load_file(file).items()}


def largest_difference(run: Path, hand: Path) -> float:
    """Of the weights of a run and of a loop by hand."""
    one, other = weights(run / "checkpoints"), weights(hand)
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def change(task: LoopTask, hand: Path) -> float:
    """The largest change of a weight by training."""
    before, after = load_file(task.model / "model.safetensors"), weights(hand)
    return max(float((before[name] - after[name]).abs().max()) for name in before)


def test_grpo_by_hand_is_the_run(task: LoopTask, tmp_path: Path) -> None:
    assert main(task.rl_words(tmp_path / "run")) == 0
    metrics = grpo(task, tmp_path / "hand")
    assert change(task, tmp_path / "hand") > 0.02
    assert largest_difference(tmp_path / "run", tmp_path / "hand") <= CLOSE
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    for own, row in zip(metrics, rows, strict=True):
        assert {name: row[name] for name in own} == pytest.approx(own, rel=1e-6, abs=1e-12)


def test_demonstrations_by_hand_are_the_run(task: LoopTask, tmp_path: Path) -> None:
    assert main(task.sft_words(tmp_path / "run")) == 0
    sft(task, tmp_path / "hand")
    assert change(task, tmp_path / "hand") > 0.02
    assert largest_difference(tmp_path / "run", tmp_path / "hand") <= CLOSE


@pytest.mark.full
@pytest.mark.parametrize("sharded", [False, True])
def test_on_two_ranks_loops_by_hand_are_the_runs_on_two_ranks(
    sharded: bool, task: LoopTask, server: ForkServer, tmp_path: Path
) -> None:
    flags = ["--fsdp"] if sharded else []
    server.must_finish(*task.rl_words(tmp_path / "rl", *flags), num_ranks=2)
    server.must_finish(*task.sft_words(tmp_path / "sft", *flags), num_ranks=2)
    options = {"fsdp": sharded}
    run_on_ranks(task, 2, [("grpo", tmp_path / "grpo", options), ("sft", tmp_path / "demonstrations", options)])
    assert largest_difference(tmp_path / "rl", tmp_path / "grpo") <= CLOSE
    assert largest_difference(tmp_path / "sft", tmp_path / "demonstrations") <= CLOSE
