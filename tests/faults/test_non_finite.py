"""What is not a number: a reward without one is a status, and no weight is ever changed by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.compare import checkpoints, differences, final_checkpoint, read_rows
from support.references import References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

NUMERICS, SERVICE = 7, 8
SHORT = ("--max_steps", "4", "--save_steps", "2", "--eval_steps", "2", "--rollout_log_interval", "1")
REWARD = """
def half(responses, labels):
    return [float("nan") if i % 2 else float(label in response)
            for i, (response, label) in enumerate(zip(responses, labels))]

def infinite(responses, labels):
    return [float("inf")] * len(responses)
"""


@pytest.fixture
def reward_file(runs: Path) -> Path:
    """A reward that gives numbers for half of the responses, and one that gives none."""
    file = runs / "reward.py"
    file.write_text(REWARD)
    return file


def flags(file: Path, function: str, share: str) -> tuple[str, ...]:
    """A run of two steps with this reward."""
    few = ("--max_steps", "2", "--eval_steps", "0", "--eval_data", "", "--rollout_log_interval", "1")
    return (*few, "--num_trajectories_to_save", "32", "--reward", f"{file}:{function}", "--max_unscored_share", share)


def test_a_reward_of_nan_is_a_status_and_never_a_number(
    server: ForkServer, task: TinyTask, runs: Path, reward_file: Path
) -> None:
    server.must_finish(*task.words("rl", runs / "run", *flags(reward_file, "half", "0.6")))
    rows = read_rows(runs / "run" / "rollouts" / "step_000001.jsonl")
    assert len(rows) == 32
    for row in rows:
        scored = row["sample"] % 2 == 0
        assert (row["status"] == "ok", row["reward"] is not None) == (scored, scored), row
    metrics = read_rows(runs / "run" / "metrics.jsonl")
    assert [row["drop/unscored"] for row in metrics] == [16, 16]
    assert all(0.0 <= row["reward/mean"] <= 1.0 for row in metrics)


@pytest.mark.parametrize(("function", "share"), [("half", "0.4"), ("infinite", "0.9")])
def test_too_many_rewards_without_a_number_stop_the_run_before_any_update(
    server: ForkServer, task: TinyTask, runs: Path, reward_file: Path, function: str, share: str
) -> None:
    ended = server.run(*task.words("rl", runs / "run", *flags(reward_file, function, share)))
    assert ended.code == SERVICE, ended.output[-3000:]
    assert "--max_unscored_share" in ended.output
    assert [path.name for path in checkpoints(runs / "run")] == ["step_000000"]
    assert not (runs / "run" / "metrics.jsonl").exists() or read_rows(runs / "run" / "metrics.jsonl") == []


def test_a_gradient_of_nan_changes_no_weight_and_a_row_of_them_stops_the_run(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    digests = runs / "digests.txt"
    spoil = [("spoil_gradients", [3, 99, str(digests)])]
    ended = server.run(*task.words("rl", runs / "run", "--max_refused_steps", "2"), preludes=spoil)
    assert ended.code == NUMERICS, ended.output[-3000:]
    applied, hashes = zip(*(line.split() for line in digests.read_text().splitlines()), strict=True)
    # each refused update is taken again once, since no row is found to be at fault
    assert applied == ("True", "True", *("False",) * 6), "two are passed over, the third ends the run"
    assert len(set(hashes[:2])) == 2
    assert set(hashes[1:]) == {hashes[1]}, "a refused update leaves every bit as it was"
    rows = read_rows(runs / "run" / "metrics.jsonl")
    assert [row["policy/updates_refused"] for row in rows] == [0, 0, 1, 1]


def test_some_refused_updates_are_passed_over_and_said(server: ForkServer, task: TinyTask, runs: Path) -> None:
    spoil = [("spoil_gradients", [2, 3, str(runs / "digests.txt")])]
    server.must_finish(*task.words("rl", runs / "run", *SHORT), preludes=spoil)
    rows = read_rows(runs / "run" / "metrics.jsonl")
    assert [row["policy/updates_refused"] for row in rows] == [0, 1, 1, 0]
    assert all(
        t.isfinite().all() for t in load_file(final_checkpoint(runs / "run") / "model" / "model.safetensors").values()
    )


@pytest.mark.parametrize(
    ("point", "nth", "value"),
    [
        ("rl.logged", 2, float("nan")),  # before a save
        ("rl.updated", 3, float("inf")),  # before the engine takes the weights
        ("rl.rolled_out", 3, float("nan")),  # before an update
    ],
)
def test_a_spoiled_weight_stops_the_run_and_reaches_no_checkpoint(
    server: ForkServer, task: TinyTask, references: References, runs: Path, point: str, nth: int, value: float
) -> None:
    """What the spoiled model samples no reward likes, so that no sample has a gradient: it is seen all the same."""
    restarts = Restarts(server, task.words("rl", runs / "run", *SHORT), runs / "run")
    ended = restarts.start([("spoil_a_weight", [point, nth, "layers.0", value])]).wait()
    assert ended.code == NUMERICS, ended.output[-3000:]
    for path in checkpoints(runs / "run"):
        weights = load_file(path / "model" / "model.safetensors")
        assert all(bool(tensor.isfinite().all()) for tensor in weights.values()), path.name
    for line in (runs / "run" / "evals.jsonl").read_text().splitlines():
        assert "non_finite" not in json.loads(line)
    restarts.finish()
    assert differences(references.run("rl", *SHORT), runs / "run") == []
