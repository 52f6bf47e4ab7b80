"""Runs in float16, from models made without memory, with averages of their weights: as the others, and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.compare import final_checkpoint, read_rows
from support.references import SAVED_AFTER_SIGNAL
from support.runs import ForkServer
from support.setup import TinyTask
from torch import Tensor

pytestmark = pytest.mark.xdist_group("invariants")

FLAGS = ("--max_steps", "3", "--save_steps", "1", "--eval_steps", "2", "--rollout_log_interval", "1")
ALL_OF_IT = ("--fsdp", "--fp16", "--meta_init", "--enable_ema", "--ema_decay", "0.5")


def weights(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def test_a_run_in_float16_learns_what_one_in_float32_does(server: ForkServer, task: TinyTask, runs: Path) -> None:
    # Small steps: at the task's own rate the loss rises in the first steps and float16's rounding grows with it.
    flags = ("--max_steps", "6", "--eval_steps", "3", "--learning_rate", "3e-4")
    server.must_finish(*task.words("sft", runs / "half", *flags, "--fp16"))
    server.must_finish(*task.words("sft", runs / "whole", *flags))
    half, whole = (read_rows(runs / name / "metrics.jsonl") for name in ("half", "whole"))
    skipped = [row["policy/updates_skipped"] for row in half]
    assert half[0]["policy/loss_scale"] == 2.0**16
    assert sum(skipped) <= 2, "the first scale is too large by little"
    scales = [row["policy/loss_scale"] for row in half]
    assert scales[1:] == [scale / 2**number for scale, number in zip(scales, skipped, strict=True)][:-1]
    assert "policy/loss_scale" not in whole[0]
    for row, other in zip(half[: [*skipped, 1].index(1)], whole, strict=False):
        assert row["policy/gradient_norm"] == pytest.approx(other["policy/gradient_norm"], rel=0.02)
    last = [read_rows(runs / name / "evals.jsonl")[-1]["eval/loss"] for name in ("half", "whole")]
    assert last[0] == pytest.approx(last[1], rel=0.1)


def test_two_ranks_with_all_of_it_are_saved_and_go_on_to_the_bit(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    """Blocks in float16, read without a whole model, with averages: stopped in the middle, resumed, exported."""
    words = [*FLAGS, *ALL_OF_IT]
    server.must_finish(*task.words("rl", runs / "one", *words), num_ranks=2)
    stop = [("signal_rank_at", [1, "rl.rolled_out", 2, "SIGTERM"])]
    stopped = server.run(*task.words("rl", runs / "two", *words), preludes=stop, num_ranks=2)
    assert (stopped.code, *stopped.other_codes) == (SAVED_AFTER_SIGNAL,) * 2, stopped.output[-3000:]
    server.must_finish("resume", str(runs / "two"), num_ranks=2)
    for part in ("model", "state"):
        expected, found = (weights(final_checkpoint(runs / name) / part) for name in ("one", "two"))
        assert expected.keys() == found.keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items()), part
    rows = read_rows(runs / "one" / "metrics.jsonl")
    assert all(row["policy/loss_scale"] >= 2.0**10 for row in rows)
    assert all(row.get("engine/probe_gap", 0.0) < 0.05 for row in rows)
    evaluated, again = (read_rows(runs / name / "evals.jsonl") for name in ("one", "two"))
    assert evaluated == again
    assert ["eval_ema/accuracy" in row for row in evaluated] == [False, True, True], "they begin as the weights"

    server.must_finish("export", str(runs / "one"), str(runs / "last"))
    server.must_finish("export", str(runs / "one"), str(runs / "averaged"), "--ema")
    final, averaged = weights(final_checkpoint(runs / "one") / "model"), weights(runs / "averaged")
    assert final.keys() == averaged.keys() == weights(runs / "last").keys()
    assert all(torch.equal(tensor, weights(runs / "last")[name]) for name, tensor in final.items())
    start = load_file(task.model / "model.safetensors")
    apart = 0
    for name, tensor in averaged.items():
        low, high = torch.minimum(start[name], final[name]), torch.maximum(start[name], final[name])
        apart += int(not torch.equal(tensor, final[name]))
        assert ((tensor - (low + high) / 2).abs() <= (high - low) + 1e-4).all(), "between the start and the end"
    assert apart == len(averaged), "no weight is the last one"


def test_an_export_of_averages_that_a_run_does_not_have_is_refused(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    server.must_finish(*task.words("sft", runs / "run", "--max_steps", "1", "--eval_steps", "0"))
    ended = server.run("export", str(runs / "run"), str(runs / "averaged"), "--ema")
    assert ended.code != 0
    assert "holds no moving average of its weights" in ended.output
    assert "--enable_ema" in ended.output
    assert not (runs / "averaged").exists()


def test_the_averages_that_a_run_evaluates_are_those_that_it_exports(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    words = ("--enable_ema", "--ema_decay", "0.6", "--actor_learning_rate", "0.01", "--save_steps", "3")
    server.must_finish(*task.words("rl", runs / "run", "--max_steps", "3", "--eval_steps", "2", *words))
    server.must_finish("export", str(runs / "run"), str(runs / "averaged"), "--ema")
    scored = server.must_finish("eval", str(runs / "run"), "--pretrain", str(runs / "averaged"))
    told = json.loads(scored.output.strip().splitlines()[-1])
    last = read_rows(runs / "run" / "evals.jsonl")[-1]
    for name in ("accuracy", "reward", "n", "mean_tokens"):
        assert last[f"eval_ema/{name}"] == told[f"eval/{name}"], name
    again = server.must_finish("eval", str(runs / "run"))
    told = json.loads(again.output.strip().splitlines()[-1])
    assert (last["eval/accuracy"], last["eval/reward"]) == (told["eval/accuracy"], told["eval/reward"])
