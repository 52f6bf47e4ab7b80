"""R1 of sft, rm, dpo and pretrain: `kill -9` at any instant and a restart by the same two commands change no bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.compare import differences
from support.kills import Kills
from support.references import KILLED, References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

STAGES = ("sft", "rm", "dpo", "pretrain")
STEPS = 30
OFTEN = ("--max_steps", f"{STEPS}", "--max_epochs", "6", "--save_steps", "1", "--eval_steps", "4")
SHORT = ("--max_steps", "2", "--save_steps", "1", "--eval_data=")
UNPATIENT = (*SHORT, "--patience", "0")
SHORT_RUNS = {
    "sft": UNPATIENT,
    "rm": SHORT,
    "dpo": UNPATIENT,
    "pretrain": ("--max_steps", "2", "--save_steps", "1", "--held_out_share", "0", "--patience", "0"),
}
NIGHT = {"sft": (10, 3, 5), "rm": (10, 3, 5), "dpo": (10, 3, 5), "pretrain": (20, 5, 5)}
"""Kills, runs and kills a run, at least."""


@pytest.mark.parametrize("stage", STAGES)
def test_two_kills_change_no_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path, stage: str
) -> None:
    """One behind a step whose save may go on, one within the save of a later step."""
    draw, short = random.Random(stage), SHORT_RUNS[stage]
    restarts = Restarts(server, task.words(stage, runs / "run", *short), runs / "run")
    for point, nth in ((f"{stage}.logged", 1), ("checkpoint.file.write.before", draw.randint(1, 9))):
        assert restarts.start([("signal_at", [point, nth, "SIGKILL"])]).wait().code == KILLED, point
    restarts.finish()
    assert differences(references.run(stage, *short), runs / "run") == []


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.night
@pytest.mark.timeout(3600)
def test_kills_at_any_time_change_no_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path, stage: str
) -> None:
    kills = Kills(server, task, references, runs, OFTEN, STEPS, seed=11, variant=stage)
    kills.at_random(*NIGHT[stage])
    found, page = kills.differences(), kills.page()
    print(f"\nR1, {stage}\n{page}")
    assert found == [], page
