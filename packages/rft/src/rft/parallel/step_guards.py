"""Guards of a run's optimizer steps: what happens to one that is refused, and the checksums of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from torch import Tensor

from rft.parallel.parallelize import ParallelModel
from rft.process.machine import Machine
from rft_core.durable_files import replace_record
from rft_trainer.batches.memory_use import MemoryUse
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.settings.run import RunSettings
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.weight_check import WeightCheck


class GuardedRun(Protocol):
    """The run whose steps are guarded."""

    @property
    def machine(self) -> Machine: ...
    @property
    def directory(self) -> RunDirectory: ...
    @property
    def resume_command(self) -> str: ...


def make_guards(
    settings: RunSettings,
    started: GuardedRun,
    progress: Progress,
    parts: Sequence[str],
    *,
    keeps_out: bool,
) -> dict[str, NumericGuard]:
    """Make the guard of each model's steps; the run's progress saves and restores what they remember.

    `parts` are the models that are trained, as their metrics name them; `keeps_out` as of `NumericGuard`: whether a
    row that is set aside stays so.
    """

    def record(row: Mapping[str, object]) -> None:
        started.directory.append_numerics({"step": progress.step + 1, **row})

    def keep_memory(use: MemoryUse) -> None:
        # the last one alone: a run that is short of memory may be so at many steps
        with started.directory.optional.tried("logs/memory"):
            file = started.directory.logs_directory / f"memory_rank_{started.machine.ranks.rank}.json"
            replace_record(file, {"step": progress.step + 1, **use.as_record()})

    progress.guards = {
        part: NumericGuard(
            part=part,
            max_rows=settings.max_rows_set_aside,
            spike_factor=settings.max_norm_spike,
            keeps_out=keeps_out,
            record=record if started.machine.is_first else None,
            keep_memory=keep_memory,
            resume_command=started.resume_command,
            record_file=str(started.directory.numerics_file),
        )
        for part in parts
    }
    return progress.guards


def make_weight_check(settings: RunSettings, started: GuardedRun, models: Iterable[ParallelModel[Any]]) -> WeightCheck:
    """Make the comparison of checksums over the models that are trained."""
    trained = list(models)

    def tensors() -> Iterable[tuple[str, Tensor]]:
        for number, model in enumerate(trained):
            named = chain(model.weights.local_shards(), sorted(model.optimizer.state_tensors().items()))
            yield from ((f"{number}/{name}" if number else name, tensor) for name, tensor in named)

    machine = started.machine
    return WeightCheck(
        tensors=tensors,
        collectives=machine.collectives,
        every=settings.weight_check_steps,
        # where weights are sharded no two ranks keep the same
        replicated=not any(model.shards_weights for model in trained),
        remedy=started.resume_command,
    )
