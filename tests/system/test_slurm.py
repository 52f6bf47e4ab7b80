"""A SLURM of one machine: two tasks under sbatch find one another; a requeued job saves, comes back and ends alike."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
STEPS = 16
CONFIGURATION = """
ClusterName=rft
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
ReturnToService=2
KillWait=60
SchedulerParameters=sched_interval=2,batch_sched_delay=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The commands of a cluster whose configuration is in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHON": sys.executable}
        self.environment |= {"OMP_NUM_THREADS": "1", "RFT_EXAMPLES": str(ROOT / "examples")}

    def __call__(self, *words: str) -> str:
        """What a command prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, cwd=self.folder)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str) -> str:
        """Submit the example's script for two tasks of one node; the job's number."""
        flags = ["--nodes=1", "--ntasks-per-node=2", "--gres=none", f"--output={self.folder}/job_%j.log"]
        told = self("sbatch", *flags, str(ROOT / "examples" / "slurm.sbatch"), *words)
        found = re.search(r"Submitted batch job (\d+)", told)
        assert found, told
        return found[1]

    def output(self, job: str) -> str:
        """Everything that a job has printed."""
        file = self.folder / f"job_{job}.log"
        return file.read_text(errors="replace") if file.is_file() else ""

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, ..."""
        found = re.search(r"JobState=(\w+)", self("scontrol", "show", "job", job))
        return found[1] if found else ""

    def wait_until_idle(self) -> None:
        """Until the machine takes jobs."""
        self.wait_for(lambda: "idle" in self.try_command("sinfo", "-h", "-o", "%T"), 60, "no idle node")

    def try_command(self, *words: str) -> str:
        """What a command prints, also while the daemons start."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout

    @staticmethod
    def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
        """Until it holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.2)


def free_ports() -> list[int]:
    """Two ports that nothing uses."""
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in (first, second)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster of this machine; its three daemons end with the tests."""
    folder = tmp_path_factory.mktemp("slurm")
    for part in ("state", "spool"):
        (folder / part).mkdir()
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, folder=folder, ports=free_ports()))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    cluster = Slurm(folder)
    munge = [f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"]
    munge += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed", "--force", "--foreground"]
    commands = [["munged", *munge], ["slurmctld", "-D"], ["slurmd", "-D"]]
    daemons: list[subprocess.Popen] = []
    try:
        for command in commands:
            program = shutil.which(command[0])
            assert program is not None
            with (folder / f"{command[0]}.out").open("wb") as output:
                daemons.append(
                    subprocess.Popen([program, *command[1:]], env=cluster.environment, stdout=output, stderr=output)
                )
            if command[0] == "munged":
                cluster.wait_for((folder / "munge.socket").exists, 30, "munged did not start")
        cluster.wait_until_idle()
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=60)


def finish(slurm: Slurm, job: str) -> None:
    """Until a job has ended, which has to be in order."""
    slurm.wait_for(lambda: slurm.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 240, slurm.output(job))
    assert slurm.state(job) == "COMPLETED", slurm.output(job)[-3000:]


def weights(run: Path) -> str:
    """SHA-256 of the last checkpoint's weights."""
    (file,) = (run / "checkpoints" / f"step_{STEPS:06d}" / "model").glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_requeued_job_saves_comes_back_and_ends_with_the_weights_of_one_that_was_left_alone(
    slurm: Slurm, grpo: Callable, metrics: Callable, tmp_path: Path
) -> None:
    alone, requeued = tmp_path / "alone", tmp_path / "requeued"
    first = slurm.submit(*grpo(alone, STEPS)[1:])
    finish(slurm, first)
    printed = slurm.output(first)
    assert "1 node x 2 = 2 ranks" in printed, printed[-3000:]
    assert "set by SLURM" in printed
    assert len(metrics(alone)) == STEPS

    second = slurm.submit(*grpo(requeued, STEPS)[1:])
    slurm.wait_for(lambda: len(metrics(requeued)) >= 5, 120, "no step was reached")
    slurm("scontrol", "requeue", second)
    slurm.wait_for(lambda: slurm.state(second) == "PENDING", 120, "the job was not requeued")
    assert 5 <= len(metrics(requeued)) < STEPS, "the run had ended before it was requeued"
    slurm.try_command("scontrol", "update", f"JobId={second}", "StartTime=now")
    finish(slurm, second)
    assert "continuing" in slurm.output(second)
    assert [row["step"] for row in metrics(requeued)] == list(range(1, STEPS + 1))
    assert weights(requeued) == weights(alone)


def test_a_job_whose_time_ends_saves_and_requeues_itself(
    slurm: Slurm, grpo: Callable, metrics: Callable, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = slurm.submit(*grpo(run, STEPS)[1:])
    slurm.wait_for(lambda: len(metrics(run)) >= 3, 120, "no step was reached")
    slurm("scancel", "--signal=USR1", "--batch", job)
    slurm.wait_for(lambda: slurm.state(job) == "PENDING", 120, slurm.output(job))
    assert "requeueing job" in slurm.output(job)
    slurm("scancel", job)
