"""Memory that runs out on one of two ranks: both go on with smaller micro-batches, or end with the command for it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support.compare import read_rows
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

FLAGS = ("--max_steps", "3", "--save_steps", "1", "--eval_steps", "0")
PEER, SERVICE = 9, 8
LITTLE = [("run_out_of_memory", [1, 14])]


def test_ranks_that_hold_the_whole_model_go_on_with_smaller_micro_batches(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    server.must_finish(*task.words("sft", runs / "run", *FLAGS), preludes=LITTLE, num_ranks=2)
    rows = read_rows(runs / "run" / "metrics.jsonl")
    assert [row["policy/micro_batch_halvings"] for row in rows] == [1.0, 1.0, 1.0]


def test_ranks_that_share_the_model_end_and_the_remedy_finishes_the_run(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    run = runs / "run"
    ended = server.run(*task.words("sft", run, *FLAGS, "--patience", "0", "--fsdp"), preludes=LITTLE, num_ranks=2)
    assert (ended.code, *ended.other_codes) == (PEER, SERVICE), ended.output[-3000:]
    log = (run / "logs" / "rank_1.log").read_text()
    remedy = next(line for line in log.splitlines() if "--micro_train_batch_size" in line)
    words = shlex.split(remedy[remedy.index("rft-train") :])
    assert words == ["rft-train", "resume", str(run), "--micro_train_batch_size", "2"]
    assert remedy[remedy.index("rft-train") :] in ended.output, "rank 0 shows it as well"
    server.must_finish(*words[1:], preludes=LITTLE, num_ranks=2)
