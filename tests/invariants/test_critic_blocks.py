"""A critic in blocks beside a policy in blocks: the values and steps of one process, saved and continued as either."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compare import checkpoints, read_rows, relative_distance
from support.references import SAVED_AFTER_SIGNAL, References
from support.runs import ForkServer
from support.setup import TinyTask
from torch import Tensor

from rft_dist.checkpoints.reader import open_verified

pytestmark = pytest.mark.xdist_group("invariants")

FLAGS = (
    *("--advantage_estimator", "gae", "--critic_learning_rate", "0.003", "--max_steps", "3", "--save_steps", "1"),
    *("--max_ckpt_num", "5", "--eval_steps", "0", "--rollout_log_interval", "1", "--num_trajectories_to_save", "32"),
)
OF_THE_ENGINE = {"engine/probe_gap", "policy/micro_batches", "critic/micro_batches"}
CHANGES = {
    "blocks to whole": (("--fsdp",), ("--no-fsdp",), 1),
    "whole to blocks": ((), ("--fsdp",), 2),
    "blocks on two to blocks on three": (("--fsdp",), (), 3),
}


def critic(run: Path, place: int) -> dict[str, Tensor]:
    """The critic's whole weights in one of the run's checkpoints."""
    blocks = open_verified(checkpoints(run)[place]).blocks("critic")
    return {name: blocks.full_tensor(name) for name in blocks.table}


def learned(run: Path) -> list[Tensor]:
    """What training added to each of them."""
    before, after = critic(run, 0), critic(run, -1)
    assert before.keys() == after.keys()
    return [after[name] - before[name] for name in sorted(before)]


@pytest.mark.parametrize(
    "strategy", [("--fsdp",), ("--fsdp", "--fsdp_cpu_offload", "--adam_offload", "--sp_size", "2")]
)
def test_two_ranks_with_a_critic_in_blocks_take_the_steps_of_one_process(
    server: ForkServer, task: TinyTask, references: References, runs: Path, strategy: tuple[str, ...]
) -> None:
    one, two = references.run("rl", *FLAGS), runs / "run"
    server.must_finish(*task.words("rl", two, *FLAGS, *strategy), num_ranks=2)
    for row, other in zip(read_rows(two / "metrics.jsonl"), read_rows(one / "metrics.jsonl"), strict=True):
        assert row.keys() - OF_THE_ENGINE == other.keys() - OF_THE_ENGINE
        for name in other.keys() - OF_THE_ENGINE:
            least = 1e-5 if "logprob_gap" in name else 1e-6
            assert row[name] == pytest.approx(other[name], rel=1e-5, abs=least), f"step {row['step']} {name}"
    assert relative_distance(learned(two), learned(one)) < 1e-3
    table = open_verified(checkpoints(two)[-1]).blocks("critic").table
    assert all(len(stored.blocks) == 2 for name, stored in table.items() if "proj.weight" in name), "a half each"


@pytest.mark.parametrize("change", CHANGES)
def test_a_critic_goes_on_in_blocks_or_whole(
    server: ForkServer, task: TinyTask, references: References, runs: Path, change: str
) -> None:
    begun, continued, num_ranks = CHANGES[change]
    one, run = references.run("rl", *FLAGS), runs / "run"
    stop = [("signal_rank_at", [1, "rl.rolled_out", 2, "SIGTERM"])]
    stopped = server.run(*task.words("rl", run, *FLAGS, *begun), preludes=stop, num_ranks=2)
    assert (stopped.code, *stopped.other_codes) == (SAVED_AFTER_SIGNAL,) * 2, stopped.output[-3000:]
    server.must_finish("resume", str(run), *continued, num_ranks=num_ranks)
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3]
    assert relative_distance(learned(run), learned(one)) < 1e-3
    last, expected = (read_rows(each / "metrics.jsonl")[-1] for each in (run, one))
    assert last["critic/loss"] == pytest.approx(expected["critic/loss"], rel=1e-4)
