"""Where a command runs: its device, its ranks, its threads."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rft_algos.errors import PreflightError
from rft_dist.collectives import Collectives
from rft_dist.launch import RankInfo, ranks_from_environment, start_process_group, stop_process_group


@dataclass(frozen=True, slots=True)
class Machine:
    """One process of a run."""

    device: str
    ranks: RankInfo
    collectives: Collectives

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.ranks.rank == 0

    def describe(self) -> str:
        """One line for the start of a run."""
        threads = torch.get_num_threads()
        noun = "thread" if threads == 1 else "threads"
        ranks = "1 process" if self.ranks.world_size == 1 else f"{self.ranks.world_size} ranks"
        return f"{ranks} on {self.device}, {threads} torch {noun} each"


def choose_device(wanted: str, local_rank: int) -> str:
    """`auto` is the GPU of this rank if there is one, else the CPU; `cuda` without a GPU is refused."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise PreflightError(
            code="device.no_cuda",
            what=f"device = {wanted}, and torch {torch.__version__} sees no CUDA device",
            where="--device",
            why="a CUDA device and a torch build that drives it are needed",
            do="--device cpu",
        )
    return f"cuda:{local_rank % torch.cuda.device_count()}"


@contextmanager
def open_machine(wanted_device: str) -> Generator[Machine]:
    """Join the ranks that the environment names, and leave them at the end.

    On a CPU that several ranks share, each takes its share of the cores unless OMP_NUM_THREADS says
    otherwise: two ranks with all cores each are many times slower.
    """
    ranks = ranks_from_environment()
    device = choose_device(wanted_device, ranks.local_rank)
    if device == "cpu" and ranks.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks.world_size))
    torch.use_deterministic_algorithms(device == "cpu")
    collectives = start_process_group(ranks, torch.device(device))
    try:
        yield Machine(device, ranks, collectives)
    finally:
        stop_process_group()
