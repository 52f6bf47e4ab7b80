"""GPUs of one machine, and who has which: the ranks the first, then the engine replicas of each rank in order."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rft.process.machine import Machine
from rft_core.errors import PreflightError

_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """Ranks and engine replicas of one machine, with GPUs by their position among the visible ones.

    Example::

        GpuPlacement(ranks=2, replicas=1, size=2, visible=6).of_replica(1, 0)  # range(4, 6)
    """

    ranks: int
    """Each has one GPU."""
    replicas: int
    """Of each rank."""
    size: int
    """GPUs of one replica."""
    visible: int
    """GPUs that this process sees."""

    @property
    def wanted(self) -> int:
        """Return the GPUs that all of them need."""
        return self.ranks + self.ranks * self.replicas * self.size

    def of_replica(self, local_rank: int, number: int) -> range:
        """Return the GPUs of a replica of a rank of this machine."""
        first = self.ranks + (local_rank * self.replicas + number) * self.size
        return range(first, first + self.size)

    def require(self) -> None:
        """Raise `PreflightError` where two of them would have the same GPU, as there are too few."""
        if self.wanted <= self.visible:
            return
        fitting = (self.visible - self.ranks) // (self.ranks * self.size)
        raise PreflightError(
            code="engine.replicas.devices",
            what=f"{_counted(self.ranks, 'rank')} with {_counted(self.replicas, 'engine replica')} of "
            f"{_counted(self.size, 'GPU')} each need {self.wanted} GPUs, {self.visible} "
            f"{'is' if self.visible == 1 else 'are'} visible",
            where=f"--engine_replicas, --engine_tp_size; {self._claims()}",
            why="a replica generates while the trainer trains, on GPUs of its own",
            state="nothing was loaded",
            do=f"--engine_replicas {fitting}" if fitting > 0 else "--engine_replicas 1 --max_staleness 0",
        )

    def _claims(self) -> str:
        """Name who has which GPU, and the first that finds none left."""
        parts = [f"{_named(range(min(self.ranks, self.visible)))}: the ranks (--nproc or the launcher)"]
        for number in range(self.ranks * self.replicas):
            rank, own = number // self.replicas, number % self.replicas
            gpus = self.of_replica(rank, own)
            if gpus.stop > self.visible:
                verb = "is" if len(gpus) == 1 else "are"
                parts.append(f"{_named(gpus)}, which {verb} not there: replica {own} of rank {rank}")
                break
            parts.append(f"{_named(gpus)}: replica {own} of rank {rank}")
        return "; ".join(parts)


def ranks_on_this_machine(machine: Machine) -> int:
    """Return the number of ranks that share the GPUs and cores of this machine."""
    # without a launcher all ranks are on this machine
    return int(os.environ.get("LOCAL_WORLD_SIZE", machine.ranks.world_size))


def only_these(gpus: Sequence[int], visible: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable with which a process sees these GPUs alone, of those that this one sees."""
    # the launcher may have hidden GPUs: positions among the visible ones are turned into its names
    given = environment.get(_DEVICES)
    names = given.split(",") if given else [str(number) for number in range(visible)]
    return {_DEVICES: ",".join(names[gpu].strip() for gpu in gpus)}


def own_gpus(machine: Machine, size: int = 1) -> dict[str, str]:
    """Return the variable with which an engine of this rank takes the rank's own GPU, and the next ones of `size`.

    Without it the engines of all ranks would take the first GPUs. Behind the last GPU comes the first, so that where
    every GPU has a rank, each has equally many parts of engines. Nothing where there is no choice.
    """
    device, visible = torch.device(machine.device), torch.cuda.device_count()
    if device.type != "cuda" or visible < 2 or size > visible:
        return {}
    first = device.index or 0
    return only_these([(first + number) % visible for number in range(size)], visible)


def _counted(number: int, word: str) -> str:
    return f"1 {word}" if number == 1 else f"{number} {word}s"


def _named(gpus: range) -> str:
    return f"GPU {gpus.start}" if len(gpus) == 1 else f"GPUs {gpus.start} to {gpus.stop - 1}"
