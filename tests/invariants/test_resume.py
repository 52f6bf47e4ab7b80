"""A run that was stopped and resumed is the run that was not: weights, moments, rows and files to the bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from support.compare import checkpoints, differences, read_rows
from support.references import SAVED_AFTER_SIGNAL, References, Restarts
from support.runs import ForkServer
from support.setup import VARIANTS, TinyTask

pytestmark = pytest.mark.xdist_group("invariants")

STOPPED_EARLY = 130
"""Exit code of a command that is stopped before its run begins."""


def stopped_at_random_instants(restarts: Restarts, seconds: float, draw: random.Random) -> list[int]:
    """The exit codes of a run that is stopped up to four times, within a time that it takes by itself."""
    codes: list[int] = []
    while not codes or codes[-1] != 0:
        child = restarts.start()
        if len(codes) < 4:
            time.sleep(seconds * draw.uniform(0.15, 0.8))
            child.send(signal.SIGTERM)
        ended = child.wait()
        codes.append(ended.code)
        # -SIGTERM or 130: it came before the run listened, and nothing had begun
        assert ended.code in (0, SAVED_AFTER_SIGNAL, -signal.SIGTERM, STOPPED_EARLY), ended.output[-3000:]
    return codes


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "pretrain"])
def test_a_run_stopped_at_random_instants_ends_like_one_that_was_not(
    server: ForkServer, task: TinyTask, references: References, runs: Path, variant: str
) -> None:
    expected, seconds = references.run(variant), references.seconds(variant)
    draw, words = random.Random(f"instants {variant}"), task.words(variant, runs / "run")
    codes = stopped_at_random_instants(Restarts(server, words, runs / "run"), seconds, draw)
    # on a machine that was busier when the reference was made, a run may be over before its first signal
    while SAVED_AFTER_SIGNAL not in codes and seconds > 0.1:
        shutil.rmtree(runs / "run")
        seconds /= 2
        codes = stopped_at_random_instants(Restarts(server, words, runs / "run"), seconds, draw)
    assert SAVED_AFTER_SIGNAL in codes
    assert differences(expected, runs / "run") == []


@pytest.mark.parametrize("variant", ["rl", "several_updates", "sft"])
def test_several_resumes_in_a_row_change_nothing(
    server: ForkServer, task: TinyTask, references: References, runs: Path, variant: str
) -> None:
    command, _ = VARIANTS[variant]
    restarts = Restarts(server, task.words(variant, runs / "run"), runs / "run")
    codes: list[int] = []
    while not codes or codes[-1] == SAVED_AFTER_SIGNAL:
        codes.append(restarts.start([("signal_at", [f"{command}.logged", 3, "SIGTERM"])]).wait().code)
    assert codes[-1] == 0
    assert len(codes) > 2
    assert restarts.fresh_starts == 1
    assert differences(references.run(variant), runs / "run") == []


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_stop_at_a_save_point_changes_nothing(
    server: ForkServer, task: TinyTask, references: References, runs: Path, nth: int
) -> None:
    restarts = Restarts(server, task.words("kl_in_reward", runs / "run"), runs / "run")
    stopped = restarts.start([("signal_at", ["checkpoint.publish.before", nth, "SIGTERM"])]).wait()
    assert stopped.code == SAVED_AFTER_SIGNAL
    restarts.finish()
    assert differences(references.run("kl_in_reward"), runs / "run") == []


def test_a_stop_in_the_last_step_finishes_the_run(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    num_steps = len(read_rows(references.run("rl") / "metrics.jsonl"))
    ended = server.run(*task.words("rl", runs / "run"), preludes=[("signal_at", ["rl.logged", num_steps, "SIGTERM"])])
    assert ended.code == 0, ended.output[-3000:]
    assert json.loads((runs / "run" / "summary.json").read_text())["outcome"] == "finished"
    assert differences(references.run("rl"), runs / "run") == []


@pytest.mark.parametrize("variant", ["rl", "sft"])
def test_a_stop_before_the_first_step_evaluates_once(
    server: ForkServer, task: TinyTask, references: References, runs: Path, variant: str
) -> None:
    restarts = Restarts(server, task.words(variant, runs / "run"), runs / "run")
    stopped = restarts.start([("signal_at", ["checkpoint.verify.after", 1, "SIGKILL"])]).wait()
    assert stopped.code == -signal.SIGKILL
    assert [path.name for path in checkpoints(runs / "run")] == ["step_000000"]
    restarts.finish()
    assert restarts.resumes == 1
    assert differences(references.run(variant), runs / "run") == []


def test_a_run_that_was_moved_goes_on(server: ForkServer, task: TinyTask, references: References, runs: Path) -> None:
    stop = [("signal_at", ["rl.logged", 4, "SIGTERM"])]
    assert server.run(*task.words("rl", runs / "first"), preludes=stop).code == SAVED_AFTER_SIGNAL
    (runs / "first").rename(runs / "second")
    assert server.run("resume", str(runs / "second"), preludes=stop).code == SAVED_AFTER_SIGNAL
    saved = [path.name for path in checkpoints(runs / "second")]
    assert saved == ["step_000006", "step_000008"], "the two newest are kept, whatever the directory was called"
    server.must_finish("resume", str(runs / "second"))
    assert differences(references.run("rl"), runs / "second") == []


def test_a_resume_with_nothing_there_is_refused(server: ForkServer, runs: Path) -> None:
    (runs / "empty").mkdir()
    for path in (runs / "nowhere", runs / "empty"):
        ended = server.run("resume", str(path))
        assert ended.code in (2, 5), ended.output
        assert str(path) in ended.output


@pytest.mark.parametrize("num_logged", [0, 3])
def test_a_run_that_was_killed_in_its_first_save_begins_again(
    server: ForkServer, task: TinyTask, references: References, runs: Path, num_logged: int
) -> None:
    words = task.words("rl", runs / "run")
    killed = server.run(*words, preludes=[("kill_in_the_first_save", ["rl.logged", num_logged])])
    assert killed.code == -signal.SIGKILL, killed.output[-3000:]
    rows = runs / "run" / "metrics.jsonl"
    assert (len(read_rows(rows)) if rows.exists() else 0) >= num_logged
    again = server.run(*words)
    assert again.code == 2, again.output
    remedy = next(line.split("do", 1)[1].strip() for line in again.output.splitlines() if line.startswith("  do"))
    assert remedy.startswith("rm -r") or "--save_path" in remedy, remedy
    assert "begins again from its start" in server.must_finish("resume", str(runs / "run")).output
    assert differences(references.run("rl"), runs / "run") == []


def test_a_load_without_a_checkpoint_is_no_fresh_start(server: ForkServer, task: TinyTask, runs: Path) -> None:
    ended = server.run(*task.words("rl", runs / "run", "--load_checkpoint"))
    assert ended.code == 5, ended.output
    assert not (runs / "run" / "metrics.jsonl").exists()


def test_a_fresh_start_over_a_run_is_refused(server: ForkServer, references: References, task: TinyTask) -> None:
    for variant in ("rl", "sft"):
        path = references.run(variant)
        before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
        ended = server.run(*task.words(variant, path))
        assert ended.code == 2, ended.output
        assert f"rft-train resume {path}" in ended.output
        assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize("variant", ["rl", "sft"])
def test_a_resume_of_a_finished_run_is_refused(server: ForkServer, references: References, variant: str) -> None:
    path = references.run(variant)
    before = (path / "summary.json").read_bytes()
    ended = server.run("resume", str(path))
    assert ended.code == 5, ended.output
    assert "nothing is left to do" in ended.output
    assert (path / "summary.json").read_bytes() == before


def test_a_resume_of_a_run_that_patience_ended_is_refused(server: ForkServer, task: TinyTask, runs: Path) -> None:
    words = task.words("sft", runs / "run", "--patience", "1", "--eval_steps", "1", "--learning_rate", "0.5")
    server.must_finish(*words)
    assert len(read_rows(runs / "run" / "metrics.jsonl")) < 15, "patience has to end it for this test to say anything"
    ended = server.run("resume", str(runs / "run"))
    assert ended.code == 5, ended.output


def test_a_run_taken_back_to_an_earlier_step_and_killed_goes_on_from_there(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    words = task.words("rl", runs / "run")
    server.must_finish(*words)
    earlier = checkpoints(runs / "run")[0]
    back = [*words, "--load_checkpoint", "--ckpt_path", str(earlier)]
    assert server.run(*back, preludes=[("signal_at", ["rl.logged", 1, "SIGKILL"])]).code == -signal.SIGKILL
    assert not (runs / "run" / "summary.json").exists(), "the end that it told of is no longer there"
    server.must_finish("resume", str(runs / "run"))
    assert differences(references.run("rl"), runs / "run") == []
