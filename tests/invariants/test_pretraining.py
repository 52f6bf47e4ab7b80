"""The pre-training term beside the rewards (`--ptx_coef`): neither cuts nor ranks change a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.compare import final_checkpoint, read_rows, relative_distance
from support.references import References
from support.runs import ForkServer
from support.setup import TinyTask
from torch import Tensor

pytestmark = pytest.mark.xdist_group("invariants")

ONE_UPDATE = ("--max_steps", "1", "--train_batch_size", "32", "--max_epochs", "1", "--eval_steps", "0")
UNCUT = ("--no-packing_samples", "--max_tokens_per_micro_batch", "0", "--micro_train_batch_size", "8")
THREE_STEPS = ("--max_steps", "3", "--eval_steps", "2")


def gradients(server: ForkServer, task: TinyTask, run: Path, *more: str) -> dict[str, Tensor]:
    """Those of one optimizer step, all terms in its loss."""
    file = run.with_suffix(".gradients")
    server.must_finish(*task.words("ptx", run, *UNCUT, *ONE_UPDATE, *more), preludes=[("save_gradients", [str(file)])])
    return load_file(file)


def test_a_step_does_not_depend_on_how_its_rows_are_cut_and_the_coefficient_is_that_of_the_gradient(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    expected = gradients(server, task, runs / "uncut")
    found = gradients(server, task, runs / "cut", "--micro_train_batch_size", "3")
    for name, gradient in expected.items():
        assert relative_distance([found[name]], [gradient]) < 1e-5, name
    [row], [cut] = (read_rows(runs / name / "metrics.jsonl") for name in ("uncut", "cut"))
    assert cut["ptx/loss"] == pytest.approx(row["ptx/loss"], rel=1e-5)
    # g(c) = g_rewards + c g_term is linear in c: three coefficients lie on a line
    twice, half = (gradients(server, task, runs / c, "--ptx_coef", c) for c in ("1.0", "0.25"))
    term = [expected[name] - half[name] for name in sorted(expected)]
    assert sum(float(part.abs().sum()) for part in term) > 0
    more = [twice[name] - expected[name] for name in sorted(expected)]
    assert relative_distance(more, [2 * part for part in term]) < 1e-4


def test_two_ranks_take_the_steps_of_one(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    one = references.run("ptx", *THREE_STEPS)
    server.must_finish(*task.words("ptx", runs / "run", *THREE_STEPS), num_ranks=2)
    rows, others = (read_rows(run / "metrics.jsonl") for run in (one, runs / "run"))
    for row, other in zip(rows, others, strict=True):
        assert other["ptx/loss"] == pytest.approx(row["ptx/loss"], rel=1e-5)
        assert other["policy/gradient_norm"] == pytest.approx(row["policy/gradient_norm"], rel=1e-5)
    before = load_file(task.model / "model.safetensors")
    updates = [
        [load_file(final_checkpoint(run) / "model/model.safetensors")[name] - tensor for name, tensor in before.items()]
        for run in (one, runs / "run")
    ]
    assert relative_distance(updates[1], updates[0]) < 1e-3
    assert all(torch.isfinite(part).all() for part in updates[0])
