"""Rollouts ahead of the trainer through the program: engine processes, kills, resumes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.compare import differences
from support.references import KILLED, References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("invariants")
SHORT = ("--max_steps", "6", "--save_steps", "2", "--generate_max_len", "6")
AHEAD = (*SHORT, "--engine_replicas", "2", "--max_staleness", "1")
EXACT = (*AHEAD, "--async_deterministic")


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_ahead_that_is_killed_and_resumed_is_the_run_that_was_not(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    expected = references.run("rl", *EXACT)
    assert [row["async/staleness_max"] for row in rows(expected)] == [0, 1, 1, 1, 1, 1]
    restarts = Restarts(server, task.words("rl", runs / "run", *EXACT), runs / "run")
    assert restarts.start([("signal_at", ["rl.updated", 4, "SIGKILL"])]).wait().code == KILLED
    restarts.finish()
    assert restarts.resumes == 1
    assert differences(expected, runs / "run") == []


@pytest.mark.night
def test_samples_go_on_under_new_weights_and_every_prompt_is_trained_once(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    words = task.words("rl", runs / "run", *AHEAD, "--max_steps", "0", "--num_episodes", "1")
    restarts = Restarts(server, words, runs / "run")
    assert restarts.start([("signal_at", ["rl.logged", 3, "SIGKILL"])]).wait().code == KILLED
    restarts.finish()
    found = rows(runs / "run")
    assert sum(row["data/prompts"] for row in found) == 40
    assert all(row["async/staleness_max"] <= 1 for row in found)
    newest = sorted((runs / "run" / "checkpoints").glob("step_*"))[-1]
    ledger = next(json.loads(path.read_text()) for path in newest.rglob("*ledger*.json"))
    assert (ledger["trained"], ledger["in_flight"]) == (40, [])


def test_two_replicas_draw_the_tokens_of_the_engine_in_the_process(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    more = (*SHORT, "--max_steps", "2", "--rollout_log_interval", "1")
    server.must_finish(*task.words("rl", runs / "one", *more))
    server.must_finish(*task.words("rl", runs / "two", *more, "--engine_replicas", "2"))
    for step in (1, 2):
        one, two = ((runs / name / "rollouts" / f"step_{step:06d}.jsonl").read_text() for name in ("one", "two"))
        tokens = [[json.loads(line)["response"] for line in text.splitlines()] for text in (one, two)]
        assert tokens[0] == tokens[1]
    assert all(row["engine/probe_gap"] < 1e-4 for row in rows(runs / "two"))


def test_what_cannot_run_ahead_is_refused_before_a_model_is_loaded(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    words = task.words("rl", runs / "run", "--max_staleness", "1", "--engine_type", "hf", "--json_errors")
    ended = server.run(*words)
    assert ended.code == 2, ended.output[-2000:]
    assert "async.engine" in ended.output
    assert not (runs / "run").exists()
