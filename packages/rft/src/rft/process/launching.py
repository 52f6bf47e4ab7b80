"""Start of a run's processes, and the comparison of ranks before a model loads. No torch is imported here."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft.resolved import Resolved
from rft.reward_kinds import given_directories
from rft.reward_names import named_models
from rft_core.errors import OptionsError
from rft_dist.launch.environment import SPAWNED, RankInfo, ranks_from_environment, timeout_seconds
from rft_dist.launch.spawn import last_lines, spawn_ranks
from rft_dist.planning.parallel_dims import BatchShare, ParallelDims, SourcedNumber
from rft_dist.preflight.compare_ranks import Report, Subject, compare_ranks
from rft_dist.preflight.process_checks import check_start, forgotten_srun
from rft_dist.preflight.rank_facts import file_facts, machine_facts, model_facts, settings_facts
from rft_dist.preflight.reachability import KeyValueStore, gloo_problem

RUNS = Path("runs")
_LOG = logging.getLogger(__name__)
_DATA = ("prompt_data", "eval_data")
_MODELS = ("pretrain", "critic_pretrain")


def spawned(resolved: Resolved[Any], program: Sequence[str], *, run: Path | None = None) -> int | None:
    """Run `program` as `--nproc` ranks and give their exit code; None where this process is to go on.

    `run` is the directory of the run where the settings do not name it.

    Raises:
        OptionsError: torchrun or srun started another number of ranks than the command line asks for.
    """
    nproc = _asked(resolved)
    if nproc < 2 or os.environ.get(SPAWNED):
        return None
    if ranks_from_environment().world_size > 1:
        _compare_with_launcher(resolved, nproc)
        return None
    folder = _log_folder(resolved, run)
    _LOG.info("starting %d ranks; ranks 1 to %d write to %s/output_rank_N.log", nproc, nproc - 1, folder)
    ended = spawn_ranks(program, nproc, log_folder=folder)
    if ended.rank is not None:
        _LOG.warning("\nrank %d ended with exit code %d; of all ranks: %s", ended.rank, ended.code, ended.codes)
        if ended.rank > 0:
            log = ended.logs[ended.rank - 1]
            _LOG.warning("the end of %s:\n%s", log, last_lines(log))
    return ended.code


def refuse_one_process(resolved: Resolved[Any], ranks: RankInfo) -> None:
    """Raise OptionsError where `nproc` asks for ranks and no launcher has started them."""
    nproc = _asked(resolved)
    if nproc > 1 and ranks.world_size == 1:
        raise OptionsError(
            code="launch.nproc_elsewhere",
            what=f"nproc = {nproc}, and this is one process",
            where=str(resolved.origins["nproc"]),
            why="only the commands rl, sft and resume start ranks; a script and a recipe's stages run in one process",
            do=f"torchrun --nproc_per_node={nproc} ...",
        )


def _written(resolved: Resolved[Any], name: str) -> str:
    """Return the origin of a setting as text."""
    return f"{name}: {resolved.origins[name]}" if name in resolved.origins else "default"


def _asked(resolved: Resolved[Any]) -> int:
    return int(resolved.values.get("nproc", 0))


def _compare_with_launcher(resolved: Resolved[Any], nproc: int) -> None:
    """Raise `OptionsError` where --nproc on the command line is not the launcher's number; one in a file may differ."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if resolved.origins["nproc"].kind != "command line" or local_world_size in ("", str(nproc)):
        return
    raise OptionsError(
        code="launch.two_launchers",
        what=f"nproc = {nproc}, LOCAL_WORLD_SIZE = {local_world_size}",
        where=f"nproc: {resolved.origins['nproc']}, LOCAL_WORLD_SIZE: the environment",
        why="the ranks were started already, by torchrun",
        do="leave --nproc out",
    )


def _log_folder(resolved: Resolved[Any], run: Path | None) -> Path:
    path = run or (Path(resolved.values["save_path"]).expanduser() if resolved.values["save_path"] else None)
    return path / "logs" if path else RUNS / ".ranks" / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}"


class Preflight:
    """Checks that the ranks of a training run make before its model loads."""

    def __init__(self, resolved: Resolved[Any], run: Path | None = None) -> None:
        """`run` is the directory that the run continues in, where it does."""
        values = resolved.values
        self._resolved = resolved
        self._run = run or Path(values["save_path"] or RUNS / "run").expanduser()
        self._report: Report | None = None
        self._ranks: RankInfo | None = None
        self._grid: ParallelDims | None = None

    @property
    def run(self) -> Path:
        """Directory of the run, as far as it is known; it may not exist yet."""
        return self._run

    def grid(self, ranks: RankInfo, *, num_devices: int, shares_devices: bool) -> ParallelDims:
        """The grid that this process is part of; PreflightError or OptionsError where there is none."""
        refuse_one_process(self._resolved, ranks)
        share = share_of(self._resolved.values)
        self._ranks = ranks
        sp_size, tp_size = (
            SourcedNumber(int(self._resolved.values.get(name, 1)), _written(self._resolved, name))
            for name in ("sp_size", "tp_size")
        )
        self._grid = check_start(
            ranks,
            num_devices=num_devices,
            shares_devices=shares_devices,
            share=share,
            sp_size=sp_size,
            tp_size=tp_size,
        )
        return self._grid

    def compare(self, store: KeyValueStore) -> None:
        """Compare the ranks' settings and files once they have met; a difference is reported on all of them."""
        assert self._ranks is not None
        self._report = compare_ranks(store, self._ranks, self._subject(), seconds=timeout_seconds())

    def lines(self) -> list[str]:
        """Return the comparison's lines for the start of the run."""
        assert self._ranks is not None
        assert self._grid is not None
        note = forgotten_srun(self._ranks, os.environ)
        lines = [*(self._grid.lines() if self._grid.world_size > 1 else []), *([note] if note else [])]
        lines += self._report.lines() if self._report else []
        if self._report and self._grid.num_nodes == 1:
            lines.append("one machine: files of data are the same ones, and not compared")
        return lines

    def _subject(self) -> Subject:
        assert self._ranks is not None
        assert self._grid is not None
        values = self._resolved.values
        facts = machine_facts() | settings_facts(values)
        for name in _MODELS:
            if values.get(name):
                facts |= {f"{name}: {key}": text for key, text in model_facts(values[name]).items()}
        for kind, flag, value in given_directories(values):
            places = [(flag, value)]
            if kind.joins_directories:
                places = [(f"{flag} {named.name}", named.place) for named in named_models(value)]
            for name, place in places:
                facts |= {f"{name}: {key}": text for key, text in model_facts(place).items()}
        if self._grid.num_nodes > 1 and self._ranks.local_rank == 0:
            facts |= file_facts(files_of(values))
        problem = gloo_problem(self._ranks, self._grid.num_nodes, os.environ)
        return Subject(facts, self._run, (problem,) if problem else ())


def share_of(values: Mapping[str, Any]) -> BatchShare:
    """The batch of a command, cut into micro-batches."""
    return BatchShare("train_batch_size", values["train_batch_size"], values["micro_train_batch_size"])


def files_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the files that a run reads, by purpose: data, and user code."""
    files: dict[str, str] = {}
    for name in _DATA:
        for number, path in enumerate(filter(None, str(values.get(name) or "").split(","))):
            files[f"{name} {number + 1}"] = path.strip()
    for name in ("reward", "model_code"):
        path = str(values.get(name) or "").partition(":")[0]
        if path.endswith(".py"):
            files[name] = path
    return files
