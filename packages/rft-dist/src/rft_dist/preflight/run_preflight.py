"""Preflight of one rank of a run: its place among the ranks, and the comparison with the others.

No torch is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rft_core.errors import OptionsError
from rft_dist.launch.environment import RankInfo, timeout_seconds
from rft_dist.planning.parallel_dims import BatchShare, ParallelDims, SourcedNumber
from rft_dist.preflight.compare_ranks import Report, Subject, compare_ranks
from rft_dist.preflight.process_checks import check_start, forgotten_srun
from rft_dist.preflight.rank_facts import file_facts, machine_facts, model_facts, settings_facts
from rft_dist.preflight.reachability import KeyValueStore, gloo_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedRun:
    """A run as its settings ask for it: the numbers of its ranks, and what all of them must have alike."""

    directory: Path
    """Directory of the run, as far as it is known; it may not exist yet."""
    nproc: SourcedNumber
    """Ranks that a command was to start on this machine; 0 = those of a launcher, or this process."""
    share: BatchShare
    sp_size: SourcedNumber
    tp_size: SourcedNumber
    values: Mapping[str, object]
    """Every setting by its flat name."""
    models: Callable[[], Mapping[str, str]]
    """Gives the model directories by the setting that names them; called once the ranks have met."""
    files: Mapping[str, str]
    """Files of data and user code by what they are for."""


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """Result of the checks that the ranks of a run make before its model loads."""

    grid: ParallelDims
    comparison: Report | None
    """Of the ranks with one another; None where there is one, or they have not met."""
    note: str
    """On a launcher that was left out; mostly empty."""


class Preflight:
    """Checks that the ranks of a training run make before its model loads."""

    def __init__(self, request: RequestedRun) -> None:
        self._request = request
        self._comparison: Report | None = None
        self._ranks: RankInfo | None = None
        self._grid: ParallelDims | None = None
        self._note = ""

    @property
    def run(self) -> Path:
        """Directory of the run, as far as it is known; it may not exist yet."""
        return self._request.directory

    def grid(self, ranks: RankInfo, *, num_devices: int, shares_devices: bool) -> ParallelDims:
        """The grid that this process is part of; PreflightError or OptionsError where there is none."""
        refuse_one_process(self._request.nproc, ranks)
        self._ranks = ranks
        self._grid = check_start(
            ranks,
            num_devices=num_devices,
            shares_devices=shares_devices,
            share=self._request.share,
            sp_size=self._request.sp_size,
            tp_size=self._request.tp_size,
        )
        self._note = forgotten_srun(ranks, os.environ)
        return self._grid

    def compare(self, store: KeyValueStore) -> None:
        """Compare the ranks' settings and files once they have met; a difference is reported on all of them."""
        assert self._ranks is not None
        self._comparison = compare_ranks(store, self._ranks, self._subject(), seconds=timeout_seconds())

    def report(self) -> PreflightReport:
        """Return what was checked and compared."""
        assert self._grid is not None
        return PreflightReport(self._grid, self._comparison, self._note)

    def _subject(self) -> Subject:
        assert self._ranks is not None
        assert self._grid is not None
        facts = machine_facts() | settings_facts(self._request.values)
        for name, directory in self._request.models().items():
            facts |= {f"{name}: {key}": text for key, text in model_facts(directory).items()}
        # one rank of each machine hashes the files; on a single machine all ranks have the same ones
        if self._grid.num_nodes > 1 and self._ranks.local_rank == 0:
            facts |= file_facts(self._request.files)
        problem = gloo_problem(self._ranks, self._grid.num_nodes, os.environ)
        return Subject(facts, self._request.directory, (problem,) if problem else ())


def refuse_one_process(nproc: SourcedNumber, ranks: RankInfo) -> None:
    """Raise OptionsError where `nproc` asks for ranks and no launcher has started them."""
    if nproc.value > 1 and ranks.world_size == 1:
        raise OptionsError(
            code="launch.nproc_elsewhere",
            what=f"nproc = {nproc.value}, and this is one process",
            where=nproc.origin,
            why="only commands that train, and resume, start ranks; a script and a recipe's stages run in one process",
            do=f"torchrun --nproc_per_node={nproc.value} ...",
        )
