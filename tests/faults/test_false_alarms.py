"""L5: runs that nothing is wrong with, with every check on: none is stopped, and hardly a word is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

CHECKS = ("--weight_check_steps", "5", "--max_norm_spike", "50", "--fingerprint_steps", "500", "--debug")
RIGHT = """
def score(response, label):
    return float(label in response) - 0.01 * len(response)
"""
MOST_WORDS = 1
"""Warnings of a sound run."""
ALARMS = {"updates_refused", "constant_reward", "no_gradient", "collapsed", "rows_lost", "metrics_lost"}
"""Findings that none of these runs may end with; one that solves its task has no signal at its end."""


def is_sound(server: ForkServer, task: TinyTask, folder: Path, seed: int, steps: int) -> None:
    """Run `rl` with a seed of its own, and look for alarms."""
    reward, run = folder / "reward.py", folder / f"run_{seed}"
    reward.write_text(RIGHT)
    rules = ("--max_steps", f"{steps}", "--num_episodes", f"{steps}", "--eval_steps", "0", "--save_steps", f"{steps}")
    own = ("--reward", f"{reward}:score", "--seed", f"{seed}", "--lr_schedule", "constant")
    ended = server.run(*task.words("rl", run, *rules, *own, *CHECKS))
    assert ended.code == 0, ended.output[-3000:]
    warnings = [line for line in ended.output.splitlines() if line.startswith("warning")]
    assert len(warnings) <= MOST_WORDS, warnings
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == steps
    assert ALARMS.isdisjoint(finding["code"] for finding in summary["verdict"]), summary["verdict"]
    assert not (run / "numerics.jsonl").exists(), "no row and no step is suspected"


STAGES = ("sft", "dpo", "rm", "pretrain")
SHARED_CHECKS = ("--weight_check_steps", "5", "--max_norm_spike", "50", "--fingerprint_steps", "500", "--debug")


def is_sound_stage(server: ForkServer, task: TinyTask, folder: Path, stage: str, seed: int, steps: int) -> None:
    """Run another stage with every check on, and look for alarms; held-out data would rightly say that it overfits."""
    run = folder / f"{stage}_{seed}"
    held_out = ("--held_out_share", "0") if stage == "pretrain" else ("--eval_data", "")
    rules = ("--max_steps", f"{steps}", "--max_epochs", f"{steps}", "--eval_steps", "0", "--save_steps", f"{steps}")
    patience = () if stage == "rm" else ("--patience", "0")
    ended = server.run(*task.words(stage, run, *rules, *held_out, *patience, "--seed", f"{seed}", *SHARED_CHECKS))
    assert ended.code == 0, ended.output[-3000:]
    warnings = [line for line in ended.output.splitlines() if line.startswith("warning")]
    assert len(warnings) <= MOST_WORDS, warnings
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == steps
    assert ALARMS.isdisjoint(finding["code"] for finding in summary["verdict"]), summary["verdict"]
    assert [alarm for alarm in summary["health"] if alarm["level"] == "alarm"] == []
    assert not (run / "numerics.jsonl").exists(), "no row and no step is suspected"


@pytest.mark.parametrize("stage", STAGES)
def test_l5_a_sound_run_of_another_stage_raises_no_alarm(
    server: ForkServer, task: TinyTask, runs: Path, stage: str
) -> None:
    is_sound_stage(server, task, runs, stage, 0, 30)


@pytest.mark.night
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stage", STAGES)
def test_l5_two_hundred_steps_of_another_stage_raise_no_alarm(
    server: ForkServer, task: TinyTask, runs: Path, stage: str, seed: int
) -> None:
    is_sound_stage(server, task, runs, stage, 100 + seed, 200)


@pytest.mark.parametrize("seed", range(2))
def test_l5_a_sound_run_raises_no_alarm(server: ForkServer, task: TinyTask, runs: Path, seed: int) -> None:
    is_sound(server, task, runs, seed, 30)


@pytest.mark.night
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_l5_five_hundred_steps_raise_no_alarm(server: ForkServer, task: TinyTask, runs: Path, seed: int) -> None:
    is_sound(server, task, runs, 100 + seed, 500)
