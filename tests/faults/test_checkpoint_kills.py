"""R1, R2, R10: kills and signals at random instants of whole runs; a few here, the whole counts in ci/full.sh."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from support.compare import checkpoints, differences
from support.kills import Kills
from support.references import SAVED_AFTER_SIGNAL, References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

STEPS = 6
OFTEN = ("--max_steps", f"{STEPS}", "--save_steps", "1", "--eval_steps", "3")
AT_ONCE = (*OFTEN, "--no-async_save")
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")


def check(kills: Kills, suite: str, num_kills: int) -> None:
    """Every run, finished, equals the uninterrupted one."""
    found = kills.differences()
    page = kills.page()
    print(f"\n{suite}\n{page}")
    assert found == [], page
    assert len(kills.instants) >= num_kills, page


@pytest.mark.parametrize("words", [OFTEN, AT_ONCE], ids=["beside", "at once"])
@pytest.mark.night
@pytest.mark.timeout(3600)
def test_two_hundred_kills_change_no_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path, words: tuple[str, ...]
) -> None:
    kills = Kills(server, task, references, runs, words, STEPS, seed=1)
    kills.at_random(200, 20, 12)
    check(kills, "R1, one rank", 200)


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_kills_of_all_ranks_at_once_change_no_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    kills = Kills(server, task, references, runs, OFTEN, STEPS, num_ranks=2, seed=2)
    kills.at_random(20, 4, 5)
    check(kills, "R1, two ranks", 20)


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_kills_of_one_rank_of_two_change_no_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    kills = Kills(server, task, references, runs, OFTEN, STEPS, num_ranks=2, seed=3)
    kills.at_random(20, 4, 5, whom=[[0], [1]])
    check(kills, "R2, one of two ranks", 20)


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_kills_of_one_rank_of_four_change_no_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    kills = Kills(server, task, references, runs, OFTEN, STEPS, num_ranks=4, seed=5)
    kills.at_random(12, 3, 4, whom=[[0], [3], [1], [2]])
    check(kills, "R2, one of four ranks", 12)


def test_a_kill_of_one_rank_of_two_changes_no_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    kills = Kills(server, task, references, runs, OFTEN, STEPS, num_ranks=2, seed=4)
    kills.at_random(2, 1, 2, whom=[[1], [0]])
    check(kills, "R2, one of two ranks, two kills", 1)


def test_five_signals_at_any_time_leave_a_checkpoint_of_this_step_or_the_one_before(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    send_signals(server, task, references, runs, 5)


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_a_hundred_signals_at_any_time_leave_a_checkpoint_of_this_step_or_the_one_before(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    send_signals(server, task, references, runs, 100)


def send_signals(server: ForkServer, task: TinyTask, references: References, runs: Path, count: int) -> None:
    """R10: a signal at a uniform instant of a run that saves by nothing else; then it is resumed to its end."""
    rarely = ("--max_steps", f"{STEPS}", "--save_steps", "0", "--save_interval", "0", "--eval_steps", "3")
    expected, seconds = references.run("rl", *rarely), references.seconds("rl", *rarely)
    draw = random.Random(10)
    sent = saved = too_early = 0
    while sent < count:
        run = runs / f"run_{sent}"
        restarts = Restarts(server, task.words("rl", run, *rarely), run)
        child = restarts.start()
        time.sleep(draw.uniform(0.0, seconds))
        child.send(signal.Signals[SIGNALS[sent % len(SIGNALS)]])
        ended = child.wait()
        sent += 1
        if not checkpoints(run):  # before the handlers were there: nothing was begun
            too_early += 1
            assert ended.code != 0
        elif ended.code == SAVED_AFTER_SIGNAL:
            saved += 1
            step = int(checkpoints(run)[-1].name.removeprefix("step_"))
            assert f"saved at step {step}" in ended.output
            rows = (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").is_file() else 0
            assert rows == step, "the newest checkpoint is that of the last whole step"
        else:
            assert ended.code == 0, ended.output[-2000:]
        if ended.code != 0:
            restarts.finish()
        assert differences(expected, run) == [], f"signal {sent}"
    print(f"\nR10: {sent} signals, {saved} saved and said so, {too_early} before the run began, the others at its end")
