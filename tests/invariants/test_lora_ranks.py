"""Adapters over ranks: replicas, blocks and shared sequences take the steps of one process, and save the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.compare import final_checkpoint, read_rows, relative_distance
from support.references import SAVED_AFTER_SIGNAL, References
from support.runs import ForkServer
from support.setup import TinyTask
from torch import Tensor

pytestmark = pytest.mark.xdist_group("invariants")

FLAGS = ("--max_steps", "3", "--lora_rank", "4", "--actor_learning_rate", "3e-3", "--rollout_log_interval", "1")
STRATEGIES = {"replicas": (), "fsdp": ("--fsdp",), "shared sequences and fsdp": ("--sp_size", "2", "--fsdp")}


def adapters(run: Path) -> dict[str, Tensor]:
    return load_file(final_checkpoint(run) / "model" / "adapter" / "adapter_model.safetensors")


def merged(run: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted((final_checkpoint(run) / "model").glob("*.safetensors")):
        found |= load_file(file)
    return found


def ups(run: Path) -> list[Tensor]:
    """The factors that start at zero, by name: what training made."""
    return [tensor for name, tensor in sorted(adapters(run).items()) if ".lora_B." in name]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_the_adapters_of_one_process(
    server: ForkServer, task: TinyTask, references: References, runs: Path, strategy: str
) -> None:
    one = references.run("several_updates", *FLAGS)
    server.must_finish(*task.words("several_updates", runs / "run", *FLAGS, *STRATEGIES[strategy]), num_ranks=2)
    for row, other in zip(read_rows(runs / "run" / "metrics.jsonl"), read_rows(one / "metrics.jsonl"), strict=True):
        assert row.get("engine/probe_gap", 0.0) < 1e-4
        for name in ("reward/mean", "policy/loss", "policy/gradient_norm"):
            assert row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), f"step {row['step']} {name}"
    assert relative_distance(ups(runs / "run"), ups(one)) < 1e-3
    ours, theirs = merged(runs / "run"), merged(one)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4
    base = load_file(task.model / "model.safetensors")
    assert all(torch.equal(ours[name], base[name]) == (not name.endswith("_proj.weight")) for name in base)


def test_blocks_of_adapters_go_on_in_one_process(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    one = references.run("several_updates", *FLAGS)
    stop = [("signal_rank_at", [1, "rl.rolled_out", 2, "SIGTERM"])]
    words = task.words("several_updates", runs / "run", *FLAGS, "--fsdp")
    stopped = server.run(*words, preludes=stop, num_ranks=2)
    assert (stopped.code, *stopped.other_codes) == (SAVED_AFTER_SIGNAL,) * 2, stopped.output[-3000:]
    server.must_finish("resume", str(runs / "run"), "--no-fsdp", num_ranks=1)
    assert relative_distance(ups(runs / "run"), ups(one)) < 1e-3


def test_bfloat16_weights_in_blocks_under_float32_adapters(server: ForkServer, task: TinyTask, runs: Path) -> None:
    more = ("--fsdp", "--bf16", "--max_steps", "2")
    server.must_finish(*task.words("rl", runs / "run", *FLAGS, *more), num_ranks=2)
    assert {tensor.dtype for tensor in adapters(runs / "run").values()} == {torch.float32}
    assert {tensor.dtype for tensor in merged(runs / "run").values()} == {torch.bfloat16}
    assert any(bool(tensor.any()) for tensor in ups(runs / "run"))
