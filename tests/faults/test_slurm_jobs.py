"""R11: arrays of jobs, a requeue that is refused, and a job that comes back on another number of machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.compare import final_checkpoint, read_rows, relative_distance
from support.references import SAVED_AFTER_SIGNAL, References
from support.runs import ForkServer
from support.setup import TinyTask
from torch import Tensor

pytestmark = pytest.mark.xdist_group("faults")

EXAMPLES = Path(__file__).parents[2] / "examples"
SAVED, SERVER_AWAY = 75, 69
FLAGS = ("--max_steps", "3", "--eval_steps", "0", "--rollout_log_interval", "1", "--num_trajectories_to_save", "32")


STEP = """
import pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
pathlib.Path("began").touch()
signal.sigwait([signal.SIGUSR1])
sys.exit(75)
"""
"""A training step that ends as one does which has saved."""


class Scheduler:
    """Doubles of SLURM's commands, which note what they are asked for."""

    def __init__(self, folder: Path, *, srun: int, scontrol: int = 0) -> None:
        """Have the training step and the requeue end with these codes."""
        self.folder = folder
        programs = {"srun": srun, "scontrol": scontrol, "sleep": 0}
        for name, code in programs.items():
            program = folder / name
            program.write_text(f'#!/bin/bash\necho "$@" >> {folder}/{name}.asked\nexit {code}\n')
            program.chmod(0o755)

    @staticmethod
    def command(*words: str) -> list[str]:
        """The body of a job: the example's script."""
        return ["bash", str(EXAMPLES / "slurm.sbatch"), *words]

    def environment(self, **variables: str) -> dict[str, str]:
        """Variables of job 17, which finds these programs."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        kept |= {"PATH": f"{self.folder}:{kept['PATH']}", "RFT_EXAMPLES": "examples", "SLURM_JOB_ID": "17"}
        return kept | variables

    def job(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a job to its end."""
        environment = self.environment(**variables)
        return subprocess.run(
            self.command(*words), env=environment, cwd=self.folder, capture_output=True, text=True, check=False
        )

    def asked(self, program: str) -> list[str]:
        """What a program was started with, call by call."""
        file = self.folder / f"{program}.asked"
        return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("code", [SAVED, SERVER_AWAY])
def test_a_saved_job_is_requeued_by_its_number_and_then_continues(tmp_path: Path, code: int) -> None:
    slurm = Scheduler(tmp_path, srun=code)
    assert slurm.job("--save_path", "run").returncode == code
    assert slurm.asked("scontrol") == ["requeue 17"]
    (tmp_path / "run").mkdir()
    slurm.job("--save_path=run")
    begins = "--kill-on-bad-exit=0 bash examples/train.sh"
    assert slurm.asked("srun") == [f"{begins} --save_path run", f"{begins} --save_path=run --load_checkpoint"]


@pytest.mark.parametrize("code", [0, 1, 9, 93])
def test_a_job_that_ended_in_another_way_is_not_requeued(tmp_path: Path, code: int) -> None:
    slurm = Scheduler(tmp_path, srun=code)
    assert slurm.job("--save_path", "run").returncode == code
    assert slurm.asked("scontrol") == []


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_job_whose_time_ends_passes_the_signal_on_and_is_requeued(tmp_path: Path, number: signal.Signals) -> None:
    slurm = Scheduler(tmp_path, srun=0)
    (tmp_path / "srun").write_text(f"#!{sys.executable}\n{STEP}")
    with subprocess.Popen(
        slurm.command("--save_path", "run"), env=slurm.environment(), cwd=tmp_path, stdout=subprocess.DEVNULL
    ) as job:
        while not (tmp_path / "began").exists():
            assert job.poll() is None, "the step did not begin"
            time.sleep(0.01)
        job.send_signal(number)
        assert job.wait(timeout=60) == SAVED
    assert slurm.asked("scontrol") == ["requeue 17"]


def test_a_requeue_that_is_refused_is_told_with_what_continues_the_run(tmp_path: Path) -> None:
    slurm = Scheduler(tmp_path, srun=SAVED, scontrol=1)
    ended = slurm.job("--save_path", "run")
    assert ended.returncode == SAVED
    assert "job 17 was not requeued: scontrol ended with 1" in ended.stderr
    assert "the run in run is as it was saved; the same sbatch command continues it" in ended.stderr
    assert slurm.asked("sleep") == [], "nothing will end this script"


ARRAY = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
"""Of the task whose job has the number of the whole array."""


def test_a_task_of_an_array_is_requeued_alone_and_has_a_run_of_its_own(tmp_path: Path) -> None:
    slurm = Scheduler(tmp_path, srun=SAVED)
    (tmp_path / "run 3").mkdir()
    assert slurm.job("--save_path", "run %a", "--seed", "%a", **ARRAY).returncode == SAVED
    assert slurm.asked("scontrol") == ["requeue 17_3"]
    [started] = slurm.asked("srun")
    assert started.endswith("train.sh --save_path run 3 --seed 3 --load_checkpoint")


def test_a_refused_task_of_an_array_is_submitted_alone(tmp_path: Path) -> None:
    ended = Scheduler(tmp_path, srun=SAVED, scontrol=2).job("--save_path", "run-%a", **ARRAY)
    assert "job 17_3 was not requeued: scontrol ended with 2" in ended.stderr
    assert "the run in run-3 is as it was saved; the same sbatch command with --array=3 continues it" in ended.stderr


def test_tasks_of_an_array_that_would_write_one_run_are_refused(tmp_path: Path) -> None:
    slurm = Scheduler(tmp_path, srun=0)
    ended = slurm.job("--save_path", "run", **ARRAY)
    assert (ended.returncode, slurm.asked("srun")) == (2, [])
    assert ended.stderr == "each task of an array has a run of its own: --save_path run-%a\n"


def update(task: TinyTask, run: Path) -> list[Tensor]:
    """What training added to each weight, by name."""
    before = load_file(task.model / "model.safetensors")
    after = load_file(final_checkpoint(run) / "model" / "model.safetensors")
    return [after[name] - before[name] for name in sorted(before)]


@pytest.mark.parametrize(("num_first", "num_then"), [(2, 1), (1, 2)])
def test_a_job_that_comes_back_on_another_number_of_machines_takes_the_same_steps(
    server: ForkServer, task: TinyTask, references: References, runs: Path, num_first: int, num_then: int
) -> None:
    words = task.words("several_updates", runs / "run", *FLAGS)
    stop = ("signal_at", ["rl.rolled_out", 2, "SIGUSR1"])
    stopped = server.run(*words, preludes=[("as_task_of_srun", []), stop], num_ranks=num_first)
    assert {stopped.code, *stopped.other_codes} == {SAVED_AFTER_SIGNAL}, stopped.output[-3000:]
    again = [("as_task_of_srun", [1])]
    ended = server.must_finish(*words, "--load_checkpoint", preludes=again, num_ranks=num_then)
    assert f"{max(num_first, num_then)} nodes x 1" in stopped.output + ended.output
    assert [row["step"] for row in read_rows(runs / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert relative_distance(update(task, runs / "run"), update(task, references.run("several_updates", *FLAGS))) < 1e-3
