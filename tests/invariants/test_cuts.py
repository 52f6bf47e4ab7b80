"""What a step does, whatever the micro-batches, the workers or the ranks: the real model in float32.

Tolerances: gradients to 1e-5 relative L2, the update to 1e-3 (AdamW magnifies noise in tiny gradients),
sampled tokens all equal.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.compare import differences, final_checkpoint, read_rows, relative_distance
from support.references import SAVED_AFTER_SIGNAL, References
from support.runs import ForkServer
from support.setup import TinyTask
from torch import Tensor

pytestmark = pytest.mark.xdist_group("invariants")

WEIGHTS = "model/model.safetensors"
ONE_UPDATE = ("--max_steps", "1", "--train_batch_size", "32", "--max_epochs", "1", "--eval_steps", "0")
CUTS = {
    "one by one": ("--micro_train_batch_size", "1", "--micro_rollout_batch_size", "1"),
    "three at a time": ("--micro_train_batch_size", "3", "--micro_rollout_batch_size", "5"),
    "all at once": ("--micro_train_batch_size", "32", "--micro_rollout_batch_size", "32"),
    "at most 17 tokens": ("--max_tokens_per_micro_batch", "17"),
    "packed to 17 tokens": ("--packing_samples", "--max_tokens_per_micro_batch", "17"),
    "packed to 100 tokens": ("--packing_samples", "--max_tokens_per_micro_batch", "100"),
}
UNCUT = ("--no-packing_samples", "--max_tokens_per_micro_batch", "0", "--micro_train_batch_size", "8")
OF_THE_CUT = {"policy/micro_batches"}


def one_update(server: ForkServer, task: TinyTask, run: Path, *more: str) -> dict[str, Tensor]:
    """The gradients of a run of one optimizer step, all terms in its loss."""
    file = run.with_suffix(".gradients")
    words = task.words("several_updates", run, *UNCUT, *ONE_UPDATE, *more)
    server.must_finish(*words, preludes=[("save_gradients", [str(file)])])
    return load_file(file)


def update(task: TinyTask, run: Path) -> list[Tensor]:
    """What training added to each weight, by name."""
    before, after = load_file(task.model / "model.safetensors"), load_file(final_checkpoint(run) / WEIGHTS)
    return [after[name] - before[name] for name in sorted(before)]


@pytest.fixture(scope="module")
def uncut(server: ForkServer, task: TinyTask, memory_root: Path) -> tuple[Path, dict[str, Tensor]]:
    """One update cut by eights, and its gradients."""
    return memory_root / "uncut", one_update(server, task, memory_root / "uncut")


@pytest.mark.parametrize("cut", CUTS)
def test_a_step_does_not_depend_on_how_the_batch_is_cut(
    server: ForkServer, task: TinyTask, uncut: tuple[Path, dict[str, Tensor]], runs: Path, cut: str
) -> None:
    expected_run, expected = uncut
    found = one_update(server, task, runs / "cut", *CUTS[cut])
    assert sorted(found) == sorted(expected)
    for name, gradient in expected.items():
        assert relative_distance([found[name]], [gradient]) < 1e-5, name
    assert relative_distance(update(task, runs / "cut"), update(task, expected_run)) < 1e-3
    [row], [expected_row] = (read_rows(run / "metrics.jsonl") for run in (runs / "cut", expected_run))
    assert expected_row["policy/gradient_norm"] > 0.1
    assert row["policy/micro_batches"] != expected_row["policy/micro_batches"], "this cut is another one"
    assert_rows_close(row, expected_row, 1e-5, besides=OF_THE_CUT)


def assert_rows_close(row: dict, expected: dict, tolerance: float, besides: set[str]) -> None:
    """Every number of a row, relative to its size; what is nearly 0 is compared with 1e-6.

    A gap is the difference of two log-probs of several nats, each with the rounding of float32: 1e-5.
    """
    assert row.keys() == expected.keys()
    for name in row.keys() - besides:
        least = 1e-5 if "logprob_gap" in name else 1e-6
        assert row[name] == pytest.approx(expected[name], rel=tolerance, abs=least), f"step {row['step']} {name}"


def test_the_number_of_reading_threads_changes_no_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    server.must_finish(*task.words("rl", runs / "run", "--num_workers", "2", "--prefetch_factor", "3"))
    assert differences(references.run("rl"), runs / "run") == []


RANK_FLAGS = (
    "--max_steps",
    "3",
    "--rollout_log_interval",
    "1",
    "--num_trajectories_to_save",
    "32",
    "--eval_steps",
    "2",
)


@pytest.fixture(scope="module")
def two_ranks(task: TinyTask, memory_root: Path) -> Path:
    """A run of two ranks over gloo, started by torchrun as a person would."""
    run = memory_root / "two_ranks"
    words = task.words("several_updates", run, *RANK_FLAGS)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "rft_cli.main",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run


def test_two_ranks_take_the_steps_of_one(task: TinyTask, references: References, two_ranks: Path) -> None:
    one = references.run("several_updates", *RANK_FLAGS)
    for step in (1, 2, 3):
        rows_one, rows_two = (read_rows(run / "rollouts" / f"step_{step:06d}.jsonl") for run in (one, two_ranks))
        assert len(rows_one) == 32
        other = [i for i, (a, b) in enumerate(zip(rows_one, rows_two, strict=True)) if a["response"] != b["response"]]
        assert other == [], f"step {step}: samples {other} differ"
    rows_one, rows_two = (read_rows(run / "metrics.jsonl") for run in (one, two_ranks))
    assert [row["step"] for row in rows_two] == [1, 2, 3], "each row is written by one rank"
    for row, expected in zip(rows_two, rows_one, strict=True):
        assert_rows_close(row, expected, 1e-5, besides=OF_THE_CUT)
    assert relative_distance(update(task, two_ranks), update(task, one)) < 1e-3


def test_two_ranks_resumed_are_two_ranks_that_were_not_stopped(
    server: ForkServer, task: TinyTask, two_ranks: Path, runs: Path
) -> None:
    words = task.words("several_updates", runs / "run", *RANK_FLAGS)
    stop = [("signal_rank_at", [1, "rl.rolled_out", 2, "SIGTERM"])]
    stopped = server.run(*words, preludes=stop, num_ranks=2)
    assert (stopped.code, *stopped.other_codes) == (SAVED_AFTER_SIGNAL, SAVED_AFTER_SIGNAL), stopped.output[-3000:]
    server.must_finish("resume", str(runs / "run"), num_ranks=2)
    assert differences(two_ranks, runs / "run") == []


def test_a_rank_that_dies_ends_the_other_with_a_checkpoint_to_go_on_from(
    server: ForkServer, task: TinyTask, two_ranks: Path, runs: Path
) -> None:
    words = task.words("several_updates", runs / "run", *RANK_FLAGS)
    died = server.run(*words, preludes=[("signal_rank_at", [1, "rl.updated", 8, "SIGKILL"])], num_ranks=2)
    assert (died.code, *died.other_codes) == (9, -9), died.output[-3000:]
    server.must_finish("resume", str(runs / "run"), num_ranks=2)
    assert differences(two_ranks, runs / "run") == []


def test_a_disk_that_refuses_one_rank_is_the_same_error_on_both(server: ForkServer, task: TinyTask, runs: Path) -> None:
    words = task.words("several_updates", runs / "run", *RANK_FLAGS)
    refused = server.run(*words, preludes=[("refuse_at", ["checkpoint.publish.before", 1, "ENOSPC"])], num_ranks=2)
    assert (refused.code, *refused.other_codes) == (6, 6), refused.output[-3000:]
