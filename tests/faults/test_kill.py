"""`kill -9` at any instant, and a restart by the same two commands: nothing is lost and no bit differs."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from support.compare import checkpoints, differences
from support.references import KILLED, References, Restarts
from support.runs import Child, ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

NUM_KILLS, NUM_RUNS, KILLS_A_RUN = 20, 5, 4
NUM_STEPS = 12
OFTEN = ("--max_steps", f"{NUM_STEPS}", "--save_steps", "1", "--eval_steps", "3")
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


def phase_of(file: Path) -> str:
    """The phase that a child was in when it died."""
    return file.read_bytes().rstrip(b"\0 ").decode() if file.exists() else "start"


def table(instants: list[tuple[int, float, str, int]], restarts: list[Restarts]) -> str:
    """The kills by phase, and each of them."""
    counts = Counter(phase for _, _, phase, _ in instants)
    lines = ["kills by phase: " + ", ".join(f"{name} {count}" for name, count in counts.most_common())]
    lines += ["run  second  phase     newest checkpoint after it"]
    lines += [f"{run:>3}  {second:>6.2f}  {phase:<8}  {step}" for run, second, phase, step in instants]
    resumes, fresh = sum(r.resumes for r in restarts), sum(r.fresh_starts for r in restarts)
    again = fresh - len(restarts)
    lines += [
        f"{len(instants)} kills of {len(restarts)} runs: {resumes} resumes, {again} fresh starts for want of a save"
    ]
    return "\n".join(lines)


def kill_after(child: Child, seconds: float) -> bool:
    """Whether the child was still there to be killed."""
    time.sleep(seconds)
    child.send(signal.SIGKILL)
    return child.wait().code == KILLED


def newest_step(run: Path) -> int:
    """-1 where nothing is committed."""
    return max((int(path.name.removeprefix("step_")) for path in checkpoints(run)), default=-1)


def is_over(run: Path) -> bool:
    """Whether the run has said that it finished."""
    summary = run / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["outcome"] == "finished"


def test_twenty_kills_at_any_time_change_no_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path, tmp_path: Path
) -> None:
    expected, seconds = references.run("rl", *OFTEN), references.seconds("rl", *OFTEN)
    to_start = max(0.0, seconds - json.loads((expected / "summary.json").read_text())["seconds"])
    draw = random.Random(20)
    instants: list[tuple[int, float, str, int]] = []
    every: list[Restarts] = []

    def add_run() -> Restarts:
        run = runs / f"run_{len(every)}"
        every.append(Restarts(server, task.words("rl", run, *OFTEN), run))
        return every[-1]

    def note(instant: float, phase_file: Path) -> None:
        instants.append((len(every) - 1, instant, phase_of(phase_file), newest_step(every[-1].run)))

    while len(instants) < NUM_KILLS or len(every) < NUM_RUNS:
        restarts, phase_file = add_run(), runs / f"phase_{len(every)}"
        for _ in range(KILLS_A_RUN):
            left = to_start + (seconds - to_start) * (1.0 - max(newest_step(restarts.run), 0) / NUM_STEPS)
            instant = draw.uniform(0.0, left)
            if not kill_after(restarts.start([("record_phase", [str(phase_file)])]), instant):
                break  # it was faster than the instant, and has finished
            note(instant, phase_file)
            if is_over(restarts.run):
                break  # killed after its last record, before the process had left
        else:
            restarts.finish()
    for point, nth in IN_A_SAVE:
        restarts, phase_file = add_run(), runs / f"phase_{point}"
        preludes = [("record_phase", [str(phase_file)]), ("signal_at", [point, nth, "SIGKILL"])]
        assert restarts.start(preludes).wait().code == KILLED
        note(float("nan"), phase_file)
        restarts.finish()
    page = table(instants, every)
    print(f"\n{page}")
    (tmp_path / "kills.txt").write_text(page + "\n")
    assert len(instants) >= NUM_KILLS + len(IN_A_SAVE)
    assert sum(phase == "save" for _, _, phase, _ in instants) >= 3
    for restarts in every:
        assert differences(expected, restarts.run) == [], f"{restarts.run.name}\n{page}"


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
    assert server.run("quickstart", "--save_path", str(runs / "run"), environment=kill).code == KILLED
    for path in (runs / "run", runs / "run" / "warm_start"):  # the second is what the warm-up itself names
        resumed = server.run("resume", str(path), environment={"RFT_FAULT": "sft.logged:2:kill"})
        assert resumed.code == KILLED, resumed.output[-3000:]
