"""Start of a run's processes, and what its settings say to the ranks. No torch is imported here."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rft.resolved import Resolved
from rft.reward_kinds import given_directories
from rft.reward_names import named_models, split_names
from rft_core.errors import OptionsError
from rft_dist.launch.environment import SPAWNED, ranks_from_environment
from rft_dist.launch.spawn import Ended, Nodes, last_lines, spawn_process, spawn_ranks
from rft_dist.launch.supervise import SUPERVISED, supervise
from rft_dist.planning.parallel_dims import BatchShare, ParallelDims, RequestedDims, SourcedNumber, resolve_grid
from rft_dist.preflight.run_preflight import RequestedRun
from rft_dist.strategies.registry import choose_strategy, strategy_settings
from rft_trainer.runs.names import RUNS, refuse_file

_LOG = logging.getLogger(__name__)
_RESUME = (sys.executable, "-m", "rft_cli.main", "resume")
_DATA = ("prompt_data", "eval_data")
_ROW_FILES = (".json", ".jsonl")
"""Suffixes of an output that is one file; any other is a directory."""
_MODELS = ("pretrain", "critic_pretrain", "reference_pretrain", "teacher_pretrain")


def spawned(
    resolved: Resolved[Any], program: Sequence[str], *, run: Path | None = None, nodes: Nodes | None = None
) -> int | None:
    """Run `program` as `--nproc` ranks, again when they die (`--restarts`), and give their exit code.

    None where this process is to go on.

    `run` is the directory of the run where the settings do not name it; `nodes` are the machines that each start so
    many ranks of it, where there are several.

    Raises:
        OptionsError: torchrun or srun started another number of ranks than the command line asks for, or the restarts
            asked for on the command line are the launcher's.
        NoProgressError: the restarts led to no newer checkpoint.
    """
    restarts = int(resolved.values.get("restarts", 0))
    nproc = max(_asked(resolved), 1 if nodes else 0)
    # a started rank reads the same --nproc, and must not start ranks in turn
    if (nproc < 2 and nodes is None and not restarts) or os.environ.get(SPAWNED) or os.environ.get(SUPERVISED):
        return None
    if nodes is None and ranks_from_environment().world_size > 1:
        _compare_with_launcher(resolved, nproc)
        _leave_restarts_to_launcher(resolved, restarts)
        return None
    if nodes is not None:
        _leave_restarts_to_launcher(resolved, restarts)
        restarts = 0
    folder = _log_folder(resolved, run)
    refuse_file(folder.parent)
    if nodes is not None:
        place = (nodes.node_rank, nodes.num_nodes, nodes.master_addr, nodes.master_port)
        _LOG.info("machine %d of %d; the ranks of all machines meet at %s:%d", *place)
    if not restarts:
        return started_ranks(program, nproc, folder, nodes=nodes)

    def start(begun: Path | None, variables: Mapping[str, str]) -> Ended:
        words = program if begun is None else [*_RESUME, str(begun)]
        if nproc < 2:
            return spawn_process(words, os.environ | variables)
        logs = _log_folder(resolved, begun or run)
        return _shown(spawn_ranks(words, nproc, log_folder=logs, environment=os.environ | variables), 0)

    return supervise(start, restarts, _kept_bytes(resolved))


def started_ranks(
    program: Sequence[str], nproc: int, folder: Path, *, nodes: Nodes | None = None, meetings: int = 1
) -> int:
    """Run `program` as ranks, as `spawn_ranks` does, say how they ended, and give the exit code of all."""
    first = nodes.node_rank * nproc if nodes else 0
    if nproc > 1:
        _LOG.info("starting %d ranks; all but the first write to %s/output_rank_N.log", nproc, folder)
    return _shown(spawn_ranks(program, nproc, log_folder=folder, nodes=nodes, meetings=meetings), first).code


def _shown(ended: Ended, first: int) -> Ended:
    """Say how the ranks of this machine, numbered from `first`, ended where one failed."""
    if ended.rank is not None:
        _LOG.warning(
            "\nrank %d ended with exit code %d; exit codes of all ranks: %s",
            first + ended.rank,
            ended.code,
            ended.codes,
        )
        # rank 0 wrote to this terminal, so its last lines have been seen
        if ended.rank > 0:
            log = ended.logs[ended.rank - 1]
            _LOG.warning("the end of %s:\n%s", log, last_lines(log))
    return ended


def group_sizes(resolved: Resolved[Any]) -> tuple[SourcedNumber, SourcedNumber]:
    """Return how many ranks share the tokens of a sample, and how many hold the parts of a matrix."""
    settings = strategy_settings(resolved.values)
    strategy = choose_strategy(settings)
    sequence, matrix = strategy.group_sizes(settings)
    return (
        SourcedNumber(sequence, _written(resolved, strategy.sequence_setting)),
        SourcedNumber(matrix, _written(resolved, strategy.matrix_setting)),
    )


def _written(resolved: Resolved[Any], name: str) -> str:
    """Return the origin of a setting as text."""
    return f"{name}: {resolved.origins[name]}" if name in resolved.origins else "default"


def _asked(resolved: Resolved[Any]) -> int:
    return int(resolved.values.get("nproc", 0))


def _compare_with_launcher(resolved: Resolved[Any], nproc: int) -> None:
    """Raise `OptionsError` where --nproc on the command line is not the launcher's number; one in a file may differ."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    # a file may have been written for other machines; a flag is meant for this start
    if resolved.origins["nproc"].kind != "command line" or local_world_size in ("", str(nproc)):
        return
    raise OptionsError(
        code="launch.two_launchers",
        what=f"nproc = {nproc}, LOCAL_WORLD_SIZE = {local_world_size}",
        where=f"nproc: {resolved.origins['nproc']}, LOCAL_WORLD_SIZE: the environment",
        why="the ranks were started already, by torchrun",
        do="leave --nproc out",
    )


def _leave_restarts_to_launcher(resolved: Resolved[Any], restarts: int) -> None:
    """Raise `OptionsError` where the command line asks for restarts of ranks that something else starts."""
    # a file may have been written for another start, as with nproc
    if not restarts or resolved.origins["restarts"].kind != "command line":
        return
    raise OptionsError(
        code="launch.restarts",
        what=f"restarts = {restarts}, and the ranks are started by a launcher or on several machines",
        where=f"restarts: {resolved.origins['restarts']}",
        why="what started the ranks has to start them again, all at once",
        do="leave --restarts out, and give torchrun --max-restarts, or sbatch --requeue",
    )


def _kept_bytes(resolved: Resolved[Any]) -> Callable[[], int] | None:
    """Return a count of the bytes of rows that an evaluation keeps beside its output; None for any other command."""
    output = resolved.values.get("output")
    if "save_path" in resolved.values or not output:
        return None
    path = Path(output).expanduser()

    def kept() -> int:
        if path.suffix in _ROW_FILES:
            beside = path.parent.iterdir() if path.parent.is_dir() else ()
            files = [file for file in beside if file.name.startswith(f"{path.name}.partial")]
        else:
            files = list(path.rglob("*.jsonl"))
        return sum(file.stat().st_size for file in files)

    return kept


def _log_folder(resolved: Resolved[Any], run: Path | None) -> Path:
    # a command that trains nothing has no run; it may have an output
    place = resolved.values.get("save_path") or resolved.values.get("output")
    path = run or (Path(place).expanduser() if place else None)
    if run is None and path is not None and path.suffix in _ROW_FILES:
        return path.with_name(f"{path.name}.logs")
    return path / "logs" if path else RUNS / ".ranks" / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}"


def requested_run(resolved: Resolved[Any], run: Path | None = None) -> RequestedRun:
    """Return what the preflight of a training run reads; `run` is the directory that the run continues in."""
    values = resolved.values
    sp_size, tp_size = group_sizes(resolved)
    return RequestedRun(
        directory=run or Path(values["save_path"] or RUNS / "run").expanduser(),
        nproc=SourcedNumber(_asked(resolved), str(resolved.origins.get("nproc", ""))),
        share=share_of(values),
        sp_size=sp_size,
        tp_size=tp_size,
        values=values,
        models=partial(models_of, values),
        files=files_of(values),
    )


def unstarted_grid(request: RequestedRun) -> ParallelDims | None:
    """Return the grid of the ranks that `--nproc` would start; None where this process is one of the run's own.

    Raises:
        PreflightError: its ranks cannot be divided as the settings ask.
    """
    if request.nproc.value < 2 or ranks_from_environment().world_size > 1:
        return None
    return resolve_grid(
        RequestedDims(
            ranks=request.nproc,
            nodes=None,
            per_node=None,
            devices=None,
            share=request.share,
            sp_size=request.sp_size,
            tp_size=request.tp_size,
            launcher="--nproc",
        )
    )


def share_of(values: Mapping[str, Any]) -> BatchShare:
    """The batch of a command, cut into micro-batches."""
    return BatchShare("train_batch_size", values["train_batch_size"], values["micro_train_batch_size"])


def models_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the model directories that a run reads, by the setting that names them."""
    models = {name: str(values[name]) for name in _MODELS if values.get(name)}
    for kind, flag, value in given_directories(values):
        if kind.joins_directories:
            models |= {f"{flag} {named.name}": named.location for named in named_models(value)}
        else:
            models[flag] = value
    return models


def files_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the files that a run reads, by purpose: data, and user code."""
    files: dict[str, str] = {}
    for name in _DATA:
        for number, path in enumerate(filter(None, str(values.get(name) or "").split(","))):
            files[f"{name} {number + 1}"] = path.strip()
    code = {"model_code": str(values.get("model_code") or "")}
    routed = re.split(r"[=+,]", str(values.get("reward_routes") or ""))
    for number, name in enumerate([*split_names(str(values.get("reward") or "")), *map(str.strip, routed)]):
        code[f"reward {number + 1}" if number else "reward"] = name
    files |= {name: path for name, text in code.items() if (path := text.partition(":")[0]).endswith(".py")}
    return files
