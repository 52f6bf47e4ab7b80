"""`kill -9` at any instant, and a restart by the same two commands: nothing is lost and no bit differs."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.compare import checkpoints, differences
from support.kills import Kills
from support.references import KILLED, References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

NUM_KILLS, NUM_RUNS, KILLS_A_RUN = 20, 5, 4
NUM_STEPS = 12
MOST_SECONDS_TO_A_STEP = 10.0
"""Twice what the specification asks for: this machine has other work."""
SHORT = ("--max_steps", "4", "--save_steps", "2", "--eval_steps", "2", "--rollout_log_interval", "1")
IN_A_SAVE = (
    ("checkpoint.file.write.before", 3),
    ("checkpoint.publish.before", 2),
    ("checkpoint.publish.after", 4),
    ("checkpoint.unlink.before", 7),
)
PROMISED = (
    "rl.rolled_out",
    "rl.updated",
    "rl.logged",
    "run.append",
    "run.appended",
    "run.replace",
    "run.rename",
    "checkpoint.space.before",
    "checkpoint.mkdir.before",
    "checkpoint.file.open.before",
    "checkpoint.file.write.after",
    "checkpoint.file.sync.after",
    "checkpoint.model.write.before",
    "checkpoint.publish.before",
    "checkpoint.publish.after",
    "checkpoint.verify.after",
    "checkpoint.retire.before",
    "checkpoint.unlink.after",
    "checkpoint.rmdir.after",
)


def newest_step(run: Path) -> int:
    """-1 where nothing is committed."""
    return max((int(path.name.removeprefix("step_")) for path in checkpoints(run)), default=-1)


def test_twenty_kills_at_any_time_change_no_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path, tmp_path: Path
) -> None:
    words = ("--max_steps", f"{NUM_STEPS}", "--save_steps", "1", "--eval_steps", "3")
    kills = Kills(server, task, references, runs, words, NUM_STEPS)
    kills.at_random(NUM_KILLS, NUM_RUNS, KILLS_A_RUN)
    kills.at_points(IN_A_SAVE)
    page = kills.page()
    print(f"\n{page}")
    (tmp_path / "kills.txt").write_text(page + "\n")
    assert len(kills.instants) >= NUM_KILLS + len(IN_A_SAVE)
    assert kills.in_a_save >= 2  # two of the points lie between the first byte of a checkpoint and its rename
    assert kills.differences() == [], page


@pytest.fixture(scope="module")
def passes(server: ForkServer, task: TinyTask, memory_root: Path) -> Counter[str]:
    """How often a short run passes each fault point."""
    file = memory_root / "points.txt"
    server.must_finish(*task.words("rl", memory_root / "listed", *SHORT), preludes=[("list_points", [str(file)])])
    return Counter(file.read_text().split())


def test_a_kill_at_every_fault_point_leaves_the_old_state_or_the_new(
    server: ForkServer, task: TinyTask, references: References, runs: Path, passes: Counter[str]
) -> None:
    assert set(PROMISED) <= set(passes), "a point that a run no longer passes protects nothing"
    expected = references.run("rl", *SHORT)
    draw = random.Random(7)
    for point in sorted(passes):
        restarts = Restarts(server, task.words("rl", runs / point, *SHORT), runs / point)
        nth = draw.randint(1, passes[point])
        fault = f"{point} pass {nth} of {passes[point]}"
        assert restarts.start([("signal_at", [point, nth, "SIGKILL"])]).wait().code == KILLED, fault
        ended = restarts.start().wait()
        assert ended.code == 0, f"{fault}: exit code {ended.code}\n{ended.output[-3000:]}"
        assert differences(expected, runs / point) == [], fault


def test_a_kill_while_a_resume_takes_back_later_records_changes_nothing(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    """The resume cuts rows and rollouts beyond its checkpoint; killed there, the next one does it again."""
    expected = references.run("rl", *SHORT)
    for number, (point, nth) in enumerate(
        [("run.replace", 1), ("run.rename", 1), ("run.remove", 1), ("run.append", 1)]
    ):
        restarts = Restarts(server, task.words("rl", runs / f"{number}", *SHORT), runs / f"{number}")
        assert restarts.start([("signal_at", ["rl.rolled_out", 4, "SIGKILL"])]).wait().code == KILLED
        assert restarts.start([("signal_at", [point, nth, "SIGKILL"])]).wait().code == KILLED, point
        restarts.finish()
        assert differences(expected, runs / f"{number}") == [], point


@pytest.mark.parametrize("phase", ["start", "eval", "rollout", "reward", "train", "save"])
def test_sigterm_in_any_phase_leaves_a_checkpoint_and_its_exit_code(
    server: ForkServer, task: TinyTask, references: References, runs: Path, phase: str
) -> None:
    restarts = Restarts(server, task.words("rl", runs / "run", *SHORT), runs / "run")
    nth = {"start": 1, "eval": 2, "save": 1}.get(phase, 3)
    told = "signal_at" if phase == "start" else "signal_in_phase"
    where = "run.replace" if phase == "start" else phase
    stopped = restarts.start([(told, [where, nth, "SIGTERM"])]).wait()
    assert stopped.code == 75, stopped.output[-3000:]
    assert newest_step(runs / "run") == {"start": 0, "eval": 2, "save": 2, "rollout": 2, "reward": 2, "train": 3}[phase]
    assert f"rft-train resume {runs / 'run'}" in stopped.output
    restarts.finish()
    assert restarts.resumes == 1
    assert differences(references.run("rl", *SHORT), runs / "run") == []


def test_a_second_sigint_stops_at_once_and_loses_only_the_step(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    restarts = Restarts(server, task.words("rl", runs / "run", *SHORT), runs / "run")
    twice = [("signal_at", ["rl.rolled_out", 4, "SIGINT"]), ("signal_at", ["rl.updated", 4, "SIGINT"])]
    stopped = restarts.start(twice[:1]).wait()
    assert stopped.code == 75
    other = Restarts(server, task.words("rl", runs / "other", *SHORT), runs / "other")
    at_once = [("signal_in_phase", ["rollout", 4, "SIGINT"]), ("signal_at", ["rl.rolled_out", 4, "SIGINT"])]
    assert other.start(at_once).wait().code == 130
    for each in (restarts, other):
        each.finish()
        assert differences(references.run("rl", *SHORT), each.run) == []


def test_a_quickstart_killed_in_its_warm_up_is_resumed(server: ForkServer, runs: Path) -> None:
    kill = {"RFT_FAULT": "checkpoint.publish.before:1:kill"}
    assert server.run("quickstart", "--nproc", "1", "--save_path", str(runs / "run"), environment=kill).code == KILLED
    for path in (runs / "run", runs / "run" / "warm_start"):  # the second is what the warm-up itself names
        resumed = server.run("resume", str(path), environment={"RFT_FAULT": "sft.logged:2:kill"})
        assert resumed.code == KILLED, resumed.output[-3000:]


@pytest.mark.night
def test_a_run_that_restarts_itself_trains_its_next_step_in_seconds(task: TinyTask, runs: Path) -> None:
    """From the kill to the step after it, by a new process that imports everything again."""
    flags = ("--max_steps", "6", "--save_steps", "1", "--eval_steps", "0", "--restarts", "1")
    words = task.words("rl", runs / "run", *flags)
    # the fourth row of a process: the second one has only three left
    environment = os.environ | {"RFT_FAULT": "rl.logged:4:kill"}
    told: list[tuple[float, int]] = []
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "rft_cli.main", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        output: list[str] = []
        for line in process.stdout:
            output.append(line)
            step = re.match(r"step (\d)/6\b", line)
            told += [(time.monotonic(), int(step[1]))] if step else []
    assert process.returncode == 0, "".join(output)[-3000:]
    steps = [step for _, step in told]
    assert steps == [1, 2, 3, 4, 4, 5, 6], "".join(output)[-3000:]
    seconds = told[4][0] - told[3][0]
    print(f"\nR1: {seconds:.1f} s from the kill to the next step, imports among them")
    assert seconds <= MOST_SECONDS_TO_A_STEP
