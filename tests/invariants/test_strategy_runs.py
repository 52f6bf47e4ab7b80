"""Whole runs with weights in blocks or with shared sequences: the rollouts, rows and weights of one process.

And from one way to lie on the ranks to another in the middle: what one saved, the next continues.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.compare import final_checkpoint, read_rows, relative_distance
from support.references import SAVED_AFTER_SIGNAL, References
from support.runs import ForkServer
from support.setup import TinyTask
from torch import Tensor

pytestmark = pytest.mark.xdist_group("invariants")

FLAGS = ("--max_steps", "3", "--rollout_log_interval", "1", "--num_trajectories_to_save", "32", "--eval_steps", "2")
STRATEGIES = {
    "fsdp": ("--fsdp",),
    "fsdp on the host": ("--fsdp", "--fsdp_cpu_offload", "--adam_offload", "--gradient_checkpointing"),
    "zero 2": ("--zero_stage", "2"),
    "zero 3": ("--zero_stage", "3"),
    "shared sequences": ("--sp_size", "2"),
    "shared sequences and fsdp": ("--sp_size", "2", "--fsdp"),
    "shared sequences by a ring": ("--sp_size", "2", "--sp_mode", "ring"),
    "parts of every matrix": ("--tp_size", "2"),
    "parts in blocks": ("--tp_size", "2", "--fsdp"),
}
OF_THE_ENGINE = {"engine/probe_gap", "policy/micro_batches"}
CHANGES = {
    "fsdp to one process": (("--fsdp",), ("--no-fsdp",), 1),
    "zero 3 to fsdp": (("--zero_stage", "3"), ("--zero_stage", "0", "--fsdp"), 2),
    "parts to fsdp": (("--tp_size", "2"), ("--tp_size", "1", "--fsdp"), 2),
    "zero 3 to parts": (("--zero_stage", "3"), ("--zero_stage", "0", "--tp_size", "2"), 2),
    "zero 3 to parts in blocks": (("--zero_stage", "3"), ("--zero_stage", "0", "--tp_size", "2", "--fsdp"), 4),
    "replicas to zero 3": ((), ("--zero_stage", "3"), 2),
}


def weights(run: Path) -> dict[str, Tensor]:
    """Of the final checkpoint, from as many files as wrote them."""
    found: dict[str, Tensor] = {}
    for file in sorted((final_checkpoint(run) / "model").glob("*.safetensors")):
        found |= load_file(file)
    return found


def update(task: TinyTask, run: Path) -> list[Tensor]:
    """What training added to each weight, by name."""
    before, after = load_file(task.model / "model.safetensors"), weights(run)
    return [after[name] - before[name] for name in sorted(before)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_take_the_steps_of_one_process(
    server: ForkServer, task: TinyTask, references: References, runs: Path, strategy: str
) -> None:
    one = references.run("several_updates", *FLAGS)
    server.must_finish(*task.words("several_updates", runs / "run", *FLAGS, *STRATEGIES[strategy]), num_ranks=2)
    num_other_responses = []
    for step in (1, 2, 3):
        expected, found = (read_rows(run / "rollouts" / f"step_{step:06d}.jsonl") for run in (one, runs / "run"))
        num_other_responses.append(sum(a["response"] != b["response"] for a, b in zip(found, expected, strict=True)))
    # After a step whose sums were added in another order, a draw may lie between the two probabilities of a token
    # (seen in one case of 16, on one kind of CPU); from there on the runs see other data and cannot be compared.
    num_comparable = next((step for step, number in enumerate(num_other_responses) if number), 3)
    assert num_comparable > 0
    assert sum(num_other_responses[: num_comparable + 1]) <= 1
    rows, others = (read_rows(run / "metrics.jsonl")[:num_comparable] for run in (runs / "run", one))
    assert len(rows) == num_comparable
    for row, other in zip(rows, others, strict=True):
        assert row.keys() - OF_THE_ENGINE == other.keys() - OF_THE_ENGINE
        assert row.get("engine/probe_gap", 0.0) < 1e-4
        for name in other.keys() - OF_THE_ENGINE:
            least = 1e-5 if "logprob_gap" in name else 1e-6
            # sums in another order: up to 1.5e-5 was seen on one kind of CPU, below 1e-5 on others
            assert row[name] == pytest.approx(other[name], rel=5e-5, abs=least), f"step {row['step']} {name}"
    if num_comparable == 3:
        assert relative_distance(update(task, runs / "run"), update(task, one)) < 1e-3


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_goes_on_under_another_strategy(
    server: ForkServer, task: TinyTask, references: References, runs: Path, change: str
) -> None:
    begun, continued, num_ranks = CHANGES[change]
    one = references.run("several_updates", *FLAGS)
    stop = [("signal_rank_at", [1, "rl.rolled_out", 2, "SIGTERM"])]
    words = task.words("several_updates", runs / "run", *FLAGS, *begun)
    stopped = server.run(*words, preludes=stop, num_ranks=2)
    assert (stopped.code, *stopped.other_codes) == (SAVED_AFTER_SIGNAL,) * 2, stopped.output[-3000:]
    server.must_finish("resume", str(runs / "run"), *continued, num_ranks=num_ranks)
    assert [row["step"] for row in read_rows(runs / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert relative_distance(update(task, runs / "run"), update(task, one)) < 1e-3


def test_blocks_of_parts_on_a_grid_of_four_go_on_as_blocks_on_two(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    one = references.run("several_updates", *FLAGS)
    stop = [("signal_rank_at", [2, "rl.rolled_out", 2, "SIGTERM"])]
    words = task.words("several_updates", runs / "run", *FLAGS, "--tp_size", "2", "--fsdp")
    stopped = server.run(*words, preludes=stop, num_ranks=4)
    assert (stopped.code, *stopped.other_codes) == (SAVED_AFTER_SIGNAL,) * 4, stopped.output[-3000:]
    server.must_finish("resume", str(runs / "run"), "--tp_size", "1", num_ranks=2)
    assert relative_distance(update(task, runs / "run"), update(task, one)) < 1e-3
