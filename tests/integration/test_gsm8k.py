"""The recipe gsm8k-tiny on the real files, cut short: stages run, counts are right, the reward sees answers alone."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from rft_cli.main import main
from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.math import Gsm8kReward
from rft_trainer.runs.reader import read_run

pytestmark = [pytest.mark.data, pytest.mark.xdist_group("heavy")]

NUM_TRAIN, NUM_TEST = 7473, 1319
HELD_OUT, EVALUATED = 64, 48
"""Of the short cut."""


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def printed(*argv: str) -> str:
    """Standard output of a command that must succeed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(list(argv)) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """The short cut, end to end; what it printed is in printed.txt."""
    path = tmp_path_factory.mktemp("gsm8k")
    words = ["recipes", "run", "gsm8k-tiny", "--quick", "--data", str(data_dir), "--save_path", str(path / "run")]
    (path / "printed.txt").write_text(printed(*words))
    return path


@pytest.fixture(scope="module")
def train(data_dir: Path) -> list[dict[str, Any]]:
    return read(data_dir / "gsm8k" / "train.jsonl")


@pytest.fixture(scope="module")
def test_rows(data_dir: Path) -> list[dict[str, Any]]:
    return read(data_dir / "gsm8k" / "test.jsonl")


def test_every_stage_leaves_its_outputs(folder: Path) -> None:
    run = folder / "run"
    assert (run / "untrained" / "config.json").is_file()
    for stage in ("sft", "rl"):
        found = read_run(run / stage)
        assert found.summary["outcome"] == "finished"
        assert found.step == found.summary["steps"] == len(found.metrics)
        (checkpoint,) = (run / stage / "checkpoints").glob("step_*[0-9]")
        assert checkpoint.name == f"step_{found.step:06d}"
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            f.name for f in (checkpoint / "model").iterdir()
        }
        assert all((run / stage / name).is_file() for name in ("config.yaml", "recipe.yaml", "command.txt", "env.json"))
    assert "all 3 stages are finished" in (folder / "printed.txt").read_text()


def test_every_row_is_read_and_counted(
    folder: Path, train: list[dict[str, Any]], test_rows: list[dict[str, Any]]
) -> None:
    assert (len(train), len(test_rows)) == (NUM_TRAIN, NUM_TEST)
    shown = (folder / "printed.txt").read_text()
    assert shown.count(f"source train: {NUM_TRAIN:,} prompts") == 2, "the supervised and the reinforcement stage"
    assert f"held out: {HELD_OUT} demonstrations, kept out of the training rows by seed 42" in shown
    assert f"{NUM_TRAIN - HELD_OUT:,} demonstrations (" in shown
    assert f"held out: {EVALUATED} prompts" in shown
    assert "left out" not in shown


def test_the_whole_recipe_takes_every_row_and_every_test_problem(folder: Path, data_dir: Path) -> None:
    data = data_dir / "gsm8k"
    model = str(folder / "run" / "untrained")
    words = ["--pretrain", model, "--prompt_data", str(data / "train.jsonl")]
    rl = printed("check", "rl", "--config", "gsm8k-tiny", *words, "--eval_data", str(data / "test.jsonl"))
    assert f"{NUM_TRAIN:,} of {NUM_TRAIN:,} rows fit" in rl
    assert f"held out: {NUM_TEST:,} prompts" in rl
    sft = printed("check", "sft", "--config", "gsm8k-tiny-sft", *words)
    assert f"{NUM_TRAIN - 200:,} demonstrations (" in sft
    assert "held out: 200 demonstrations" in sft


def test_the_validation_loss_falls_and_the_best_weights_are_kept(folder: Path) -> None:
    rows = read(folder / "run" / "sft" / "evals.jsonl")
    losses = [row["eval/loss"] for row in rows]
    assert rows[0]["name"] == "before"
    assert rows[-1]["name"] == "after"
    assert losses[-1] == min(losses)
    assert losses[-1] < losses[0] - 3.0


def test_both_evaluations_hold_a_number_for_every_problem(folder: Path) -> None:
    rows = {row["name"]: row for row in read(folder / "run" / "rl" / "evals.jsonl")}
    summary = read_run(folder / "run" / "rl").summary["eval"]
    for name in ("before", "after"):
        row = rows[name]
        assert len(row["rewards"]) == len(row["correct"]) == row["eval/n"] == EVALUATED
        assert row["eval/unscored"] == 0
        assert row["eval/reward"] == pytest.approx(sum(row["rewards"]) / EVALUATED)
        assert row["eval/accuracy"] == sum(row["correct"]) / EVALUATED == summary[name]["accuracy"]
    assert "mean reward" in (folder / "printed.txt").read_text()


def test_the_saved_model_gets_the_rewards_of_the_run_on_the_test_problems(
    folder: Path, test_rows: list[dict[str, Any]]
) -> None:
    printed("eval", str(folder / "run" / "rl"), "--output", str(folder / "answers.jsonl"))
    answers = read(folder / "answers.jsonl")
    assert [row["prompt"] for row in answers] == [row["question"] + "\n" for row in test_rows[:EVALUATED]]
    assert [row["label"] for row in answers] == [row["answer"] for row in test_rows[:EVALUATED]]
    after = next(row for row in read(folder / "run" / "rl" / "evals.jsonl") if row["name"] == "after")
    assert [row["reward"] for row in answers] == after["rewards"]


def test_rollouts_are_judged_by_the_response_alone(folder: Path, train: list[dict[str, Any]]) -> None:
    rows = [row for file in sorted((folder / "run" / "rl" / "rollouts").glob("*.jsonl")) for row in read(file)]
    assert len(rows) == 3 * 32, "32 of each step's 64"
    solutions = {row["question"] + "\n": row["answer"] for row in train}
    assert all(solutions[row["prompt"]] == row["label"] for row in rows)
    assert not any(row["response"].startswith(row["prompt"]) for row in rows)
    reward = Gsm8kReward()
    try:
        told = reward([item(row, f"#### {row['label'].split('#### ')[1]}") for row in rows])
    finally:
        reward.close()
    assert [score.value for score in told] == [row["reward"] for row in rows], "an answer in the prompt earns nothing"
    for row in rows:
        correct, form = row["breakdown"]["correctness"], row["breakdown"]["format"]
        assert row["reward"] == pytest.approx(0.9 * correct + 0.1 * form)
        assert form == 0.0 or (row["finish_reason"] == "stop" and "####" in row["response"])


def item(row: dict[str, Any], prompt: str) -> RewardItem:
    return RewardItem(row["prompt_id"], prompt, row["response"], row["label"], row["finish_reason"], row["num_tokens"])


def test_every_reference_solution_earns_the_whole_reward(
    train: list[dict[str, Any]], test_rows: list[dict[str, Any]]
) -> None:
    reward = Gsm8kReward()
    rows = [*train, *test_rows]
    try:
        scores = reward([RewardItem(str(i), "", row["answer"], row["answer"], "stop", 1) for i, row in enumerate(rows)])
        wrong = reward([RewardItem("0", "", "#### 123456789", row["answer"], "stop", 1) for row in rows])
        silent = reward([RewardItem("0", row["answer"], "", row["answer"], "stop", 1) for row in rows])
    finally:
        reward.close()
    assert {score.value for score in scores} == {1.0}
    assert {score.value for score in wrong} == {0.1}
    assert {score.value for score in silent} == {0.0}
