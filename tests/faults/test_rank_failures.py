"""A run of several ranks of which one fails: all show its error, and the run goes on from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.compare import differences
from support.references import KILLED
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

FLAGS = ("--max_steps", "3", "--save_steps", "1", "--eval_steps", "3", "--rollout_log_interval", "1")
PEER = 9


@pytest.fixture(scope="module")
def two_ranks(server: ForkServer, task: TinyTask, memory_root: Path) -> Path:
    """Two ranks that nothing happens to."""
    run = memory_root / "two_ranks_undisturbed"
    server.must_finish(*task.words("rl", run, *FLAGS), num_ranks=2)
    return run


def log(run: Path, rank: int) -> str:
    """What a rank wrote into its log."""
    return (run / "logs" / f"rank_{rank}.log").read_text()


def test_every_rank_has_a_log_of_its_own_from_its_start_to_its_end(two_ranks: Path) -> None:
    for rank in (0, 1):
        lines = log(two_ranks, rank).splitlines()
        assert f"rank {rank} of 2 (node 0, " in lines[0]
        assert [int(line.split()[4].rstrip(",")) for line in lines if " end of step " in line] == [1, 2, 3]
    assert "step 3/3" in log(two_ranks, 0)
    assert "held out" in log(two_ranks, 0)
    assert not (two_ranks / "error.json").exists()


def test_an_error_of_one_rank_is_the_error_of_all_and_the_run_goes_on_from_its_checkpoint(
    server: ForkServer, task: TinyTask, two_ranks: Path, runs: Path
) -> None:
    run = runs / "run"
    refused = [("refuse_rank_at", [1, "rl.rolled_out", 2, "EIO"])]
    ended = server.run(*task.words("rl", run, *FLAGS), preludes=refused, num_ranks=2)
    assert (ended.code, *ended.other_codes) == (PEER, 1), ended.output[-3000:]
    error = json.loads((run / "error.json").read_text())
    assert (error["kind"], error["rank"], error["error"]["type"]) == ("failure", 1, "OSError")
    assert error["error"]["step"] == 2
    assert any("injected" in line for line in error["error"]["traceback"])
    for text in (log(run, 0), ended.output, (run / "logs/stopped.txt").read_text()):
        assert "rank 1 (" in text
        assert "failed at step 2, phase other: OSError" in text
    assert "Traceback" in log(run, 1)
    server.must_finish("resume", str(run), num_ranks=2)
    assert differences(two_ranks, run) == []
    assert not (run / "error.json").exists()
    assert log(run, 1).count("rank 1 of 2") == 2


def test_a_killed_rank_is_named_with_its_process_by_the_one_that_is_left(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    run = runs / "run"
    killed = [("signal_rank_at", [1, "rl.updated", 2, "SIGKILL"])]
    child = server.start(*task.words("rl", run, *FLAGS), preludes=killed, num_ranks=2)
    ended = child.wait()
    assert (ended.code, *ended.other_codes) == (PEER, KILLED), ended.output[-3000:]
    assert f"pid {child.pids[1]}) is gone" in ended.output
    assert f"rft-train resume {run}" in ended.output
    error = json.loads((run / "error.json").read_text())
    assert (error["kind"], error["rank"]) == ("gone", 1)
    assert json.loads((run / "summary.json").read_text())["outcome"] == "interrupted"


def test_a_rank_that_is_killed_right_after_the_ranks_met_is_named(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    killed = [("signal_rank_at", [1, "launch.store.present", 1, "SIGKILL"])]
    child = server.start(*task.words("rl", runs / "run", *FLAGS), preludes=killed, num_ranks=2)
    ended = child.wait()
    assert (ended.code, *ended.other_codes) == (PEER, KILLED), ended.output[-3000:]
    assert "rank 1" in ended.output
    assert not (runs / "run").exists()


def longest_step(run: Path) -> float:
    """Seconds of the slowest step, on this machine as busy as it is."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return max(float(row["time/step"]) for row in rows)


def test_a_rank_that_waits_for_ever_is_named_with_its_phase(
    server: ForkServer, task: TinyTask, two_ranks: Path, runs: Path
) -> None:
    run = runs / "run"
    # far above what a step takes here: the limit is then reached in the sleep, and in no phase that is only slow
    limit = max(2.0, 8 * longest_step(two_ranks))
    limits = ("--watchdog_seconds", f"{limit:.1f}", "--watchdog_first_seconds", f"{30 * limit:.1f}")
    asleep = [("sleep_rank_at", [1, "rl.rolled_out", 2, 600.0])]
    ended = server.run(*task.words("rl", run, *FLAGS, *limits), preludes=asleep, num_ranks=2)
    assert (ended.code, *ended.other_codes) == (PEER, PEER), ended.output[-3000:]
    page = (run / "logs/stopped.txt").read_text()
    assert page.startswith("the run ends: rank 1 (")
    assert "has been in phase" in page.splitlines()[0]
    assert "preludes.py" in page.partition("rank 1 was last at")[2]
    assert page.splitlines()[0] in log(run, 0)


@pytest.mark.parametrize(("num_ranks", "prompts"), [(4, 2), (4, 5), (3, 1)])
def test_ranks_without_work_wait_for_nobody(
    server: ForkServer, task: TinyTask, runs: Path, num_ranks: int, prompts: int
) -> None:
    """Prompts and samples that do not divide by the ranks, down to ranks that have none in any step."""
    words = ("--rollout_batch_size", str(prompts), "--n_samples_per_prompt", "1", "--advantage_estimator", "reinforce")
    batch = ("--train_batch_size", str(prompts), "--micro_train_batch_size", "1", "--micro_rollout_batch_size", "1")
    run = runs / "run"
    ended = server.run(*task.words("rl", run, *FLAGS, *words, *batch), num_ranks=num_ranks)
    assert (ended.code, *ended.other_codes) == (0,) * num_ranks, ended.output[-3000:]
    assert " end of step 3" in log(run, num_ranks - 1)
