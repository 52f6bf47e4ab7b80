"""Two machines made of network namespaces, and a SLURM of one machine, for tests that need root and Debian packages.

The sandbox of `test_sandbox` needs bubblewrap alone.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.setup import TinyTask

NODES = ("rft_a", "rft_b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
REWARD = '''"""The share of zeros in a response: a tiny model learns it within twenty steps."""


def reward_fn(responses, labels):
    return [response.count("0") / max(2, len(response)) for response in responses]
'''


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, and so count, what this machine lacks the programs or the rights for."""
    needs = {"test_two_nodes": ("ip",), "test_slurm": ("slurmctld", "slurmd", "munged")}
    as_anybody = {"test_sandbox", "test_sandbox_at_length"}
    needs |= {name: ("bwrap",) for name in as_anybody}
    lacking = [
        item
        for item in items
        for name, programs in needs.items()
        if item.path.stem == name
        and ((os.geteuid() != 0 and name not in as_anybody) or not all(map(shutil.which, programs)))
    ]
    if lacking:
        config.hook.pytest_deselected(items=lacking)
        items[:] = [item for item in items if item not in lacking]


def ip(*words: str, node: str | None = None) -> None:
    """One `ip` command, inside a node where one is named."""
    inside = ("ip", "netns", "exec", node) if node else ()
    subprocess.run([*inside, "ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Job:
    """The processes of one launch, an agent a node."""

    agents: list[subprocess.Popen]
    logs: list[Path]

    def wait(self, seconds: float) -> list[int]:
        """Exit codes; the processes are killed when the time is over."""
        deadline = time.monotonic() + seconds
        try:
            return [agent.wait(timeout=max(1.0, deadline - time.monotonic())) for agent in self.agents]
        finally:
            self.stop()

    def stop(self) -> None:
        """Nothing of the launch stays."""
        for agent in self.agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()

    def output(self, node: int) -> str:
        """Everything that a node printed."""
        return self.logs[node].read_text(errors="replace")


class TwoNodes:
    """Two network namespaces joined by one cable."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def launch(self, words: Sequence[str], *, mounts: Sequence[tuple[Path, Path]] = (), **environment: str) -> Job:
        """`torchrun --nnodes=2` with one rank a node, of `rft-train WORDS`.

        `mounts` are (what, where) that the second node alone sees: files and folders laid over those of the first.
        """
        self._count += 1
        logs = [self._folder / f"launch_{self._count}_{node}.log" for node in NODES]
        over = ((), mounts)
        return Job([self._agent(n, words, environment, logs[n], over[n]) for n in range(len(NODES))], logs)

    def _agent(
        self,
        number: int,
        words: Sequence[str],
        environment: dict[str, str],
        log: Path,
        mounts: Sequence[tuple[Path, Path]],
    ) -> subprocess.Popen:
        values = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_TIMEOUT": "15"} | environment
        values["PYTHONUNBUFFERED"] = "1"
        torchrun = ["--nnodes=2", "--nproc_per_node=1", f"--node_rank={number}"]
        torchrun += [f"--master_addr={ADDRESSES[0]}", "--master_port=29511"]
        laid = "".join(f"mount --bind {shlex.quote(str(a))} {shlex.quote(str(b))} && " for a, b in mounts)
        inside = ["bash", "-c", f'{laid}exec "$@"', "node"]  # `ip netns exec` has mounts of its own
        command = [
            "ip",
            "netns",
            "exec",
            NODES[number],
            *inside,
            sys.executable,
            "-m",
            "torch.distributed.run",
            *torchrun,
        ]
        with log.open("wb") as output:
            return subprocess.Popen(
                [*command, "-m", "rft_cli.main", *words],
                env=values,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,
            )

    def cut(self) -> None:
        """Pull the cable."""
        ip("link", "set", "eth0", "down", node=NODES[1])

    def mend(self) -> None:
        """Plug it in again."""
        ip("link", "set", "eth0", "up", node=NODES[1])


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    """Both machines, up and able to reach one another; gone at the end."""
    for node in NODES:
        subprocess.run(["ip", "netns", "delete", node], check=False, capture_output=True)
    try:
        for node in NODES:
            ip("netns", "add", node)
        ip("link", "add", "eth0", "netns", NODES[0], "type", "veth", "peer", "name", "eth0", "netns", NODES[1])
        for node, address in zip(NODES, ADDRESSES, strict=True):
            ip("address", "add", f"{address}/24", "dev", "eth0", node=node)
            ip("link", "set", "eth0", "up", node=node)
            ip("link", "set", "lo", "up", node=node)
        yield TwoNodes(tmp_path)
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "delete", node], check=False, capture_output=True)


@pytest.fixture
def reward(tmp_path: Path) -> str:
    """The name of a reward that is learned fast."""
    file = tmp_path / "zeros.py"
    file.write_text(REWARD)
    return f"{file}:reward_fn"


@pytest.fixture
def grpo(task: TinyTask, reward: str) -> Callable[[Path, int], list[str]]:
    """The words of a GRPO run of so many steps that learns `reward`."""

    def words(run: Path, steps: int) -> list[str]:
        flags = f"--max_steps {steps} --num_episodes 40 --n_samples_per_prompt 8 --rollout_batch_size 16"
        flags += " --train_batch_size 128 --micro_train_batch_size 64 --actor_learning_rate 2e-3 --eval_steps 0"
        flags += f" --lr_schedule constant --save_steps 2 --save_interval 0 --reward {reward}"
        return task.words("rl", run, *flags.split())

    return words


def rows(run: Path) -> list[dict]:
    """The whole rows of a run's metrics."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.fixture
def metrics() -> Callable[[Path], list[dict]]:
    """Reads a run's metrics."""
    return rows


@pytest.fixture
def until() -> Callable[[Callable[[], object], float], None]:
    """Waits for a condition; fails when the time is over."""

    def wait(condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            time.sleep(0.05)

    return wait
