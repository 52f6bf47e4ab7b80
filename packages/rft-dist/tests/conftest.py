"""A run small enough to be saved hundreds of times, whose every value tells the step that it belongs to."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from rft_core import fault_points
from rft_dist.checkpoint_format.shards import Shard, full_shard
from rft_dist.checkpoints.async_writer import BackgroundSaves, Copy
from rft_dist.checkpoints.reader import Checkpoint
from rft_dist.checkpoints.store import CheckpointInfo, CheckpointStore
from rft_dist.testing.checkpoint_ranks import ThreadExchange, run_ranks

torch.set_num_threads(1)

COMPONENTS = ("ledger", "optimizer", "schedule")


class Killed(BaseException):
    """Stands for the end of the process: nothing in the package may catch it."""


class SmallRun:
    """Saves and recognises states, each known by its step and a salt that tells two saves of one step apart."""

    Killed = Killed

    def __init__(self, directory: Path, run_id: str = "run-a") -> None:
        self.directory = directory
        self.run_id = run_id

    def store(
        self,
        keep_last: int | None = None,
        keep_bytes: int | None = None,
        run_id: str | None = None,
        exchange: ThreadExchange | None = None,
        fallback: Path | None = None,
    ) -> CheckpointStore:
        """A store on the run's folder."""
        return CheckpointStore(
            self.directory,
            keep_last=keep_last,
            keep_bytes=keep_bytes,
            run_id=run_id or self.run_id,
            components=COMPONENTS,
            exchange=exchange,
            fallback=fallback,
        )

    @staticmethod
    def tensors(step: int, salt: int = 0, size: int = 37) -> dict[str, dict[str, Tensor]]:
        """Components that are tensors."""
        generator = torch.Generator().manual_seed(1000 * step + salt)
        moments = {
            "exp_avg/weight": torch.randn(size, 3, generator=generator),
            "exp_avg/bias": torch.randn(3, generator=generator).to(torch.bfloat16),
            "step/weight": torch.tensor(float(step)),
            "empty": torch.empty(0, 4),
            "seen": torch.tensor([True, False]),
        }
        return {"optimizer": moments}

    @staticmethod
    def records(step: int, salt: int = 0) -> dict[str, Any]:
        """Components that are JSON."""
        ledger = {"step": step, "salt": salt, "trained": [f"p{index}" for index in range(step % 7)]}
        return {"ledger": ledger, "schedule": {"position": step, "rate": 0.1 * salt}}

    @staticmethod
    def model_writer(step: int, salt: int = 0) -> Callable[[Path], None]:
        """Fills a model directory with files at two levels."""

        def write(directory: Path) -> None:
            weights = {"weight": torch.full((5, 5), float(1000 * step + salt)), "bias": torch.arange(3.0)}
            (directory / "model.safetensors").write_bytes(save(weights))
            SmallRun.describe(step, salt)(directory)

        return write

    def save(self, store: CheckpointStore, step: int, salt: int = 0, size: int = 37, **metadata: Any) -> CheckpointInfo:
        """One save of the state (step, salt)."""
        return store.save(
            step,
            tensors=self.tensors(step, salt, size),
            records=self.records(step, salt),
            model_writer=self.model_writer(step, salt),
            metadata=metadata,
        )

    def save_by_ranks(self, num_ranks: int, step: int, salt: int = 0, **limits: Any) -> list[Any]:
        """One save by ranks that share the rows of every tensor; the outcome of each."""

        def save(exchange: ThreadExchange) -> CheckpointInfo:
            rank = exchange.rank
            weights = {"weight": torch.full((5, 5), float(1000 * step + salt)), "bias": torch.arange(3.0)}
            owners = {"weight": 0, "bias": num_ranks - 1}
            return self.store(exchange=exchange, **limits).save(
                step,
                tensors={"optimizer": self.rows(rank, num_ranks, step, salt)},
                records=self.records(step, salt) if rank == 0 else {},
                model_writer=self.describe(step, salt),
                model_tensors={name: value for name, value in weights.items() if owners[name] == rank},
                metadata={},
            )

        return run_ranks(num_ranks, save)

    def save_beside(self, store: CheckpointStore, step: int, salt: int = 0, size: int = 37) -> CheckpointInfo | None:
        """One save in the background, while the tensors change."""
        tensors = self.tensors(step, salt, size)
        weights = {"weight": torch.full((5, 5), float(1000 * step + salt)), "bias": torch.arange(3.0)}

        def snapshot(copy: Copy) -> Callable[[Path], None]:
            copied = {name: copy(name, value) for name, value in weights.items()}

            def write(directory: Path) -> None:
                self.describe(step, salt)(directory)
                (directory / "model.safetensors").write_bytes(save(copied))

            return write

        saves = BackgroundSaves(store)
        saves.begin(step, tensors=tensors, records=self.records(step, salt), snapshot=snapshot, metadata={})
        for tensor in (*tensors["optimizer"].values(), *weights.values()):
            tensor.zero_()
        return saves.wait()

    def rows(self, rank: int, num_ranks: int, step: int, salt: int = 0) -> list[Shard]:
        """A rank's rows of every tensor; scalars and what is empty are rank 0's."""
        found: list[Shard] = []
        for name, tensor in self.tensors(step, salt)["optimizer"].items():
            if not tensor.ndim or not tensor.numel():
                found += [full_shard(name, tensor)] if rank == 0 else []
                continue
            size = -(-tensor.shape[0] // num_ranks)
            piece = tensor[rank * size : (rank + 1) * size]
            start = (min(rank * size, tensor.shape[0]), *(0,) * (tensor.ndim - 1))
            found += [Shard(name, tuple(tensor.shape), start, piece)] if piece.numel() else []
        return found

    @staticmethod
    def describe(step: int, salt: int) -> Callable[[Path], None]:
        """Fills a model directory with all but its weights."""

        def write(directory: Path) -> None:
            (directory / "config.json").write_text(json.dumps({"step": step, "salt": salt}))
            (directory / "extra").mkdir()
            (directory / "extra" / "notes.txt").write_text(f"{step} {salt}")

        return write

    def state_of(self, checkpoint: Checkpoint) -> tuple[int, int]:
        """The (step, salt) of a checkpoint; fails where any part of it is not of that one state."""
        ledger = checkpoint.records("ledger")
        step, salt = ledger["step"], ledger["salt"]
        assert checkpoint.step == step
        assert {name: checkpoint.records(name) for name in ("ledger", "schedule")} == self.records(step, salt)
        found = checkpoint.tensors("optimizer")
        want = self.tensors(step, salt, found["exp_avg/weight"].shape[0])["optimizer"]
        assert set(found) == set(want)
        assert all(torch.equal(found[name], want[name]) and found[name].dtype == want[name].dtype for name in want)
        assert json.loads((checkpoint.model_directory / "config.json").read_text()) == {"step": step, "salt": salt}
        assert (checkpoint.model_directory / "extra" / "notes.txt").read_text() == f"{step} {salt}"
        files = checkpoint.model_directory.glob("*.safetensors")
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert set(weights) == {"weight", "bias"}
        assert torch.equal(weights["weight"], torch.full((5, 5), float(1000 * step + salt)))
        return step, salt

    def names(self) -> list[str]:
        """What the folder holds; nothing where there is none."""
        return sorted(path.name for path in self.directory.iterdir()) if self.directory.is_dir() else []


@pytest.fixture
def small_run(tmp_path: Path) -> SmallRun:
    """A run whose folder does not exist yet."""
    return SmallRun(tmp_path / "run" / "checkpoints")


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the system has one: a sweep flushes thousands of files, which a busy disk makes slow."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="rft-dist-") as folder:
        yield Path(folder)


@pytest.fixture
def make_run() -> type[SmallRun]:
    """For tests that bring their own folders."""
    return SmallRun


@pytest.fixture(autouse=True)
def no_fault_hook_stays() -> Iterator[None]:
    """A hook that a test installed ends with it."""
    yield
    fault_points.install(None)


@pytest.fixture
def free_port() -> int:
    """A TCP port that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
