"""Pre-training on two ranks of which one runs out of memory, is killed, raises or sleeps, or has no text to measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.compare import differences, final_checkpoint, read_rows, relative_distance
from support.references import KILLED, References
from support.runs import Ended, ForkServer, Prelude
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

PEER = 9
FLAGS = ("--max_steps", "6", "--save_steps", "2", "--eval_steps", "0", "--patience", "0", "--held_out_share", "0")


def on_two(server: ForkServer, task: TinyTask, run: Path, *more: str, fault: Prelude) -> Ended:
    return server.run(*task.words("pretrain", run, *FLAGS, *more), preludes=[fault], num_ranks=2)


def log(run: Path, rank: int) -> str:
    return (run / "logs" / f"rank_{rank}.log").read_text()


def test_memory_that_runs_out_on_one_rank_makes_both_go_on_with_the_smaller_micro_batch(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    smaller = references.run("pretrain", *FLAGS, "--micro_train_batch_size", "1", num_ranks=2)
    ended = on_two(server, task, runs / "run", fault=("run_out_of_memory", [1, 30, 3]))
    assert (ended.code, *ended.other_codes) == (0, 0), ended.output[-3000:]
    rows, others = (read_rows(run / "metrics.jsonl") for run in (runs / "run", smaller))
    assert [row.get("policy/micro_batch_halvings", 0) for row in rows] == [0, 0, 1, 1, 1, 1]
    for row, other in zip(rows, others, strict=True):
        assert row["sft/loss"] == pytest.approx(other["sft/loss"], rel=1e-5)
    weights = [load_file(final_checkpoint(run) / "model/model.safetensors") for run in (runs / "run", smaller)]
    # the first two steps add their micro-batches in another order
    assert relative_distance(*(each.values() for each in weights)) < 1e-5


def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    run = runs / "run"
    child = server.start(
        *task.words("pretrain", run, *FLAGS),
        preludes=[("signal_rank_at", [1, "pretrain.logged", 5, "SIGKILL"])],
        num_ranks=2,
    )
    ended = child.wait()
    assert (ended.code, *ended.other_codes) == (PEER, KILLED), ended.output[-3000:]
    assert f"pid {child.pids[1]}) is gone" in ended.output
    error = json.loads((run / "error.json").read_text())
    assert (error["kind"], error["rank"]) == ("gone", 1)
    for rank in (0, 1):
        assert f"rank {rank} of 2 (node 0, " in log(run, rank).splitlines()[0]
        assert " end of step 4" in log(run, rank)
    server.must_finish("resume", str(run), num_ranks=2)
    assert differences(references.run("pretrain", *FLAGS, num_ranks=2), run) == []


def test_an_error_of_one_rank_is_shown_by_the_other_with_its_line(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    ended = on_two(server, task, runs / "run", fault=("raise_rank_at", [1, "pretrain.logged", 2, "no such thing"]))
    assert (ended.code, *ended.other_codes) == (PEER, 1), ended.output[-3000:]
    for text in (log(runs / "run", 0), (runs / "run/logs/stopped.txt").read_text()):
        assert "ValueError: no such thing" in text
        assert "preludes.py" in text
    error = json.loads((runs / "run" / "error.json").read_text())
    assert (error["rank"], error["error"]["type"]) == (1, "ValueError")


def test_a_rank_that_waits_for_its_texts_is_named_with_the_phase(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    rows = (references.run("pretrain", *FLAGS, num_ranks=2) / "metrics.jsonl").read_text().splitlines()
    # far above what a step takes here, so that no phase that is only slow reaches the limit
    limit = max(2.0, 8 * max(json.loads(row)["time/step"] for row in rows))
    limits = ("--watchdog_seconds", f"{limit:.1f}", "--watchdog_first_seconds", f"{30 * limit:.1f}")
    ended = on_two(server, task, runs / "run", *limits, fault=("sleep_rank_in_phase", [1, "data", 3, 600.0]))
    assert (ended.code, *ended.other_codes) == (PEER, PEER), ended.output[-3000:]
    page = (runs / "run/logs/stopped.txt").read_text()
    assert page.startswith("the run ends: rank 1 (")
    assert "has been in phase data" in page.splitlines()[0]
    assert page.splitlines()[0] in log(runs / "run", 0)


def test_a_rank_without_a_held_out_window_waits_for_nobody(server: ForkServer, task: TinyTask, runs: Path) -> None:
    held_out = (*FLAGS, "--held_out_share", "0.2", "--max_eval_samples", "1", "--eval_steps", "2")
    for name, num_ranks in (("one", 1), ("two", 2)):
        ended = server.must_finish(*task.words("pretrain", runs / name, *held_out), num_ranks=num_ranks)
        assert ended.other_codes == (0,) * (num_ranks - 1)
    measured = [[row["eval/loss"] for row in read_rows(runs / name / "evals.jsonl")] for name in ("one", "two")]
    assert len(measured[0]) >= 3
    assert measured[1] == pytest.approx(measured[0], rel=1e-4)
