"""Runs whose reward is a model: stopped and continued to the bit, and the same on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.compare import differences, final_checkpoint, read_rows, relative_distance
from support.references import SAVED_AFTER_SIGNAL, References, Restarts
from support.reward_bench import write_reward_model
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("invariants")


@pytest.fixture(scope="module")
def words(task: TinyTask, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A function and a model with two heads, weighted."""
    path = write_reward_model(task.model, tmp_path_factory.mktemp("reward") / "rm")
    weights = "correctness=1,rm/long=0.5,rm/clear=0.25"
    return ("--reward", "exact", "--reward_pretrain", str(path), "--reward_weights", weights, "--max_steps", "6")


def test_a_run_that_is_stopped_and_continued_is_the_run_that_was_not(
    server: ForkServer, task: TinyTask, references: References, runs: Path, words: tuple[str, ...]
) -> None:
    expected = references.run("rl", *words)
    assert {"reward/correctness", "reward/rm/long", "reward/rm/clear"} <= read_rows(expected / "metrics.jsonl")[
        0
    ].keys()
    restarts = Restarts(server, task.words("rl", runs / "run", *words), runs / "run")
    stopped = restarts.start([("signal_at", ["rl.logged", 2, "SIGTERM"])]).wait()
    assert stopped.code == SAVED_AFTER_SIGNAL, stopped.output[-3000:]
    restarts.finish()
    assert differences(expected, runs / "run") == []


def test_two_ranks_score_as_one(
    server: ForkServer, task: TinyTask, references: References, runs: Path, words: tuple[str, ...]
) -> None:
    one = references.run("rl", *words)
    server.must_finish(*task.words("rl", runs / "run", *words), num_ranks=2)
    for step in (2, 4, 6):
        expected, found = (read_rows(run / "rollouts" / f"step_{step:06d}.jsonl") for run in (one, runs / "run"))
        assert [row["response"] for row in found] == [row["response"] for row in expected]
        for row, other in zip(found, expected, strict=True):
            assert row["reward"] == pytest.approx(other["reward"], abs=1e-5)
            assert row["breakdown"] == pytest.approx(other["breakdown"], abs=1e-5)
    before = load_file(task.model / "model.safetensors")
    updates = [
        [after[name] - before[name] for name in sorted(before)]
        for after in (load_file(final_checkpoint(run) / "model" / "model.safetensors") for run in (runs / "run", one))
    ]
    assert relative_distance(*updates) < 1e-3
