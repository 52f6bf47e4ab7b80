"""Supervised steps with all terms (row weights, label smoothing, z-loss, noise on the embeddings), however divided."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.compare import final_checkpoint, read_rows, relative_distance
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("invariants")

ONE_UPDATE = ("--max_steps", "1", "--train_batch_size", "12", "--eval_steps", "0", "--patience", "0")
NAMES = ("sft/loss", "sft/nll", "sft/z_loss", "policy/gradient_norm")


def update(server: ForkServer, task: TinyTask, run: Path, *more: str) -> tuple[dict[str, float], list]:
    """(metrics, what training added to each weight) of a run of one optimizer step."""
    server.must_finish(*task.words("sft_terms", run, *ONE_UPDATE, *more))
    before, after = (load_file(path / "model.safetensors") for path in (task.model, final_checkpoint(run) / "model"))
    [row] = read_rows(run / "metrics.jsonl")
    return {name: row[name] for name in NAMES}, [after[name] - before[name] for name in sorted(before)]


@pytest.mark.parametrize(
    "division",
    [
        ("--micro_train_batch_size", "1"),
        ("--packing_samples", "--max_tokens_per_micro_batch", "30"),
        ("--micro_train_batch_size", "3", "--nproc", "2"),
        ("--fused_linear_logprob",),
    ],
    ids=["one by one", "packed", "two ranks", "chunks of the head"],
)
def test_a_step_with_all_terms_does_not_depend_on_how_it_is_divided(
    server: ForkServer, task: TinyTask, runs: Path, division: tuple[str, ...]
) -> None:
    metrics, change = update(server, task, runs / "whole", "--micro_train_batch_size", "12")
    divided, divided_change = update(server, task, runs / "divided", *division)
    assert metrics["sft/z_loss"] > 0
    assert max(float(part.abs().max()) for part in change) > 0
    assert divided == pytest.approx(metrics, rel=1e-5)
    assert relative_distance(divided_change, change) < 1e-3
