"""Start and end of a training run: its directory, the checkpoint it continues from, its sinks, its summary."""

from __future__ import annotations

import hashlib
import logging
import platform
import shlex
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from rft.checkpoints.writer import ResumePoint
from rft.front_end import SILENT, FrontEnd
from rft.process.machine import Machine
from rft.resolved import Resolved
from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.layout import published
from rft_dist.checkpoint_format.manifest import ManifestFault
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_dist.checkpoints.reader import read_manifest
from rft_dist.launch.environment import environment_report
from rft_dist.settings import CheckpointSettings
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.metrics.sink import RunInfo, Sink
from rft_trainer.runs.checkpointing import Saver
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.names import run_name
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.settings.run import RunSettings
from rft_trainer.sinks.jsonl import JsonlSink

RUNS = Path("runs")
_LOG = logging.getLogger(__name__)
_PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "rft-core",
    "rft-algos",
    "rft-models",
    "rft-dist",
    "rft-engine",
    "rft-trainer",
    "rft",
)


@dataclass(frozen=True, slots=True)
class RunStart:
    """Start of a run: its directory, and the checkpoint that it continues from, if any."""

    directory: RunDirectory
    restored: ResumePoint | None
    resume_command: str
    begin: Callable[[], None]
    """Write the directory's first files, or cut it back to the checkpoint: once everything else is built."""
    lacks_its_end: bool = False
    """Whether the run goes on in its own directory and has not said that it finished: a kill after the last
    checkpoint leaves a run with nothing to train and no summary."""
    goes_back: bool = False
    """Whether later checkpoints of this run stand beside the one that it continues from: that one is saved again
    before later records are taken away, so that it is the newest for whoever resumes next."""


def choose_path(settings: CheckpointSettings, run: RunSettings, recipe: str, machine: Machine) -> Path:
    """The directory of the run, the same on every rank."""
    if settings.save_path:
        return Path(settings.save_path).expanduser()
    name = run.run_name or run_name(recipe, under=RUNS)
    agreed = machine.collectives.broadcast_bytes(name.encode() if machine.is_first else None)
    return RUNS / agreed.decode()


def start(
    resolved: Resolved[Any],
    command: Sequence[str],
    path: Path,
    machine: Machine,
    *,
    in_place: bool = False,
    script: str = "",
    front: FrontEnd = SILENT,
) -> RunStart:
    """Find the run's directory and the checkpoint to continue from; `begin` makes the first change on disk.

    A part that cannot be built (a reward, an engine, a tracker) so fails before anything is written, and
    the mended command starts in the same place. `in_place` continues the run at `path` from its newest
    checkpoint. With `--load_checkpoint` a checkpoint of this very run is continued in place too; one of
    another run starts a new directory. `script` is the program whose code is part of the run, where there is one.
    """
    checkpoint: CheckpointSettings = resolved.settings.checkpoint
    restored = None
    source = path if in_place else Path(checkpoint.ckpt_path or path) if checkpoint.load_checkpoint else None
    if source is not None:
        name = "ckpt_path" if checkpoint.ckpt_path else "load_checkpoint"
        asked_by = "rft-train resume" if in_place else f"--{name}"
        if in_place and machine.is_first:
            _require_any(path)
        restored = _find(source, asked_by=asked_by, machine=machine, origin=str(resolved.origins[name]))
        in_place = in_place or _belongs_to(restored, path)
    resume_command = continued_by(script, path) if script else f"rft-train resume {path}"
    directory = RunDirectory(path, sync_every=_SYNC_EVERY)

    def begin() -> None:
        if not machine.is_first:
            return
        machine.forget_last_failure()
        if in_place and restored is not None:
            # rows after the checkpoint are done again
            _cut_back(directory, restored.step)
        else:
            _create(resolved, command, directory, machine, resume_command)
        front.run_begins(path)

    if machine.is_first and not in_place:
        directory.refuse_existing(resume_command if published(directory.checkpoints_directory) else remove(path))
    machine.attach(path, resume_command)
    return RunStart(
        directory,
        restored,
        resume_command,
        begin,
        lacks_its_end=in_place and _lacks_its_end(directory, machine),
        goes_back=in_place and restored is not None and _has_later(directory, restored),
    )


def continued_by(script: str, path: Path) -> str:
    """Return the remedy that continues a run whose reward or trainer is code of a script."""
    return f"{script}, with load_checkpoint=True and save_path={str(path)!r}"


def remove(path: Path) -> str:
    """The command that makes room for a fresh start where nothing was saved."""
    return f"rm -r {shlex.quote(str(path))}"


def _lacks_its_end(directory: RunDirectory, machine: Machine) -> bool:
    """Return True unless the summary of rank 0 says that the run finished; read before anything is changed."""
    outcome = b""
    if machine.is_first:
        outcome = str((directory.read_summary() or {}).get("outcome", "")).encode()
    return machine.collectives.broadcast_bytes(outcome if machine.is_first else None) != b"finished"


def _has_later(directory: RunDirectory, restored: ResumePoint) -> bool:
    for path in published(directory.checkpoints_directory).values():
        try:
            if read_manifest(path).sequence > restored.checkpoint.manifest.sequence:
                return True
        except (OSError, ManifestFault):
            continue  # it cannot be resumed from either
    return False


def _cut_back(directory: RunDirectory, step: int) -> None:
    RunDirectory.open(directory.path)
    cut = directory.cut_after(step)
    again = f"; {cut.metrics} later rows are done again" if cut.metrics else ""
    _LOG.info("continuing %s from step %d%s", directory.path, step, again)


def _create(
    resolved: Resolved[Any], command: Sequence[str], directory: RunDirectory, machine: Machine, resume_command: str
) -> None:
    RunDirectory.create(
        directory.path,
        config_text=resolved.config_yaml,
        command=command,
        environment=environment(machine),
        recipe_text=_recipe_text(resolved),
        resume_command=resume_command,
    )


_SYNC_EVERY = 100
"""Rows between two fsyncs: a checkpoint syncs before it is published, and what comes after it is done again anyway."""


def _find(source: Path, *, asked_by: str, machine: Machine, origin: str) -> ResumePoint:
    """Find the checkpoint to continue from: rank 0 verifies and quarantines, the others open the one it chose."""
    if machine.is_first:
        resolved = resolve_checkpoint(source, asked_by=asked_by, origin=origin)
        for finding in resolved.findings:
            _LOG.warning("passed over a damaged checkpoint: %s", finding)
        machine.collectives.broadcast_bytes(str(resolved.checkpoint.path).encode())
        return ResumePoint(resolved.checkpoint)
    chosen = Path(machine.collectives.broadcast_bytes(None).decode())
    return ResumePoint(resolve_checkpoint(chosen, asked_by=asked_by, origin=origin).checkpoint)


def _require_any(path: Path) -> None:
    """Raise `CheckpointError` where no checkpoint was saved, with the command that starts the run again."""
    folder = RunDirectory(path).checkpoints_directory
    if published(folder) or any(folder.glob("quarantine_*")):
        return
    raise CheckpointError(
        code="run.nothing_saved",
        what=f"{path} holds no checkpoint: the run ended before its first save",
        where=str(folder),
        why="a run is continued from a checkpoint",
        state="nothing was trained, so a fresh start loses nothing; nothing was changed",
        do=f"{remove(path)} && {_first_command(path)}",
    )


def _first_command(path: Path) -> str:
    file = path / "command.txt"
    return file.read_text().strip() if file.is_file() else "rft-train"


def _belongs_to(restored: ResumePoint, path: Path) -> bool:
    return restored.checkpoint.path.resolve().parent.parent == path.resolve()


def _recipe_text(resolved: Resolved[Any]) -> str | None:
    return resolved.sources[-1].read_text() if resolved.sources else None


def metadata(resolved: Resolved[Any], data_hash: str) -> dict[str, object]:
    """Return the run's metadata, part of every checkpoint manifest."""
    return {
        "command": resolved.command,
        "config_sha256": hashlib.sha256(resolved.config_yaml.encode()).hexdigest(),
        "data_sha256": data_hash,
        "seed": resolved.settings.run.seed,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Python and the packages that decide what a run computes."""
    versions_by_name = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions_by_name[name] = version(name)
        except PackageNotFoundError:
            versions_by_name[name] = "not installed as a package"
    return versions_by_name


def environment(machine: Machine) -> dict[str, Any]:
    """Return the content of env.json: machine, versions, and the variables that have an effect."""
    return {
        "working_directory": str(Path.cwd()),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "device": machine.device,
        "world_size": machine.ranks.world_size,
        "torch_threads": torch.get_num_threads(),
        "versions": versions(),
        "variables": [list(row) for row in environment_report()],
    }


def make_sinks(directory: RunDirectory, run: RunSettings, num_steps: int, front: FrontEnd) -> list[Sink]:
    """Return the sinks: the run directory first, then the front end's, then the trackers that were asked for."""
    sinks: list[Sink] = [JsonlSink(directory), *front.make_sinks(run, num_steps)]
    if run.use_wandb:
        from rft_trainer.sinks.wandb import WandbSink

        sinks.append(
            WandbSink(
                project=run.use_wandb,
                entity=run.wandb_org or None,
                group=run.wandb_group or None,
                run_name=run.wandb_run_name or None,
            )
        )
    if run.use_tensorboard:
        from rft_trainer.sinks.tensorboard import TensorboardSink

        sinks.append(TensorboardSink(Path(run.use_tensorboard)))
    if run.use_trackio:
        from rft_trainer.sinks.trackio import TrackioSink

        sinks.append(TrackioSink(project=run.use_trackio))
    return sinks


class Training(Protocol):
    """A training loop that is built and ready to run."""

    @property
    def finished(self) -> bool: ...
    @property
    def saver(self) -> Saver: ...
    @property
    def ledger(self) -> Ledger: ...
    def run(self, signals: StopSignals) -> object: ...


def execute(
    training: Training,
    started: RunStart,
    resolved: Resolved[Any],
    sinks: Sequence[Sink],
    signals: StopSignals,
    *,
    is_first: bool,
) -> None:
    """Train from the beginning of the run to its end."""
    with running(training, started, resolved, sinks, is_first=is_first):
        training.run(signals)


@contextmanager
def running(
    training: Training, started: RunStart, resolved: Resolved[Any], sinks: Sequence[Sink], *, is_first: bool
) -> Generator[None]:
    """Begin the directory, and at the end of the block write the outcome, whatever happened in it.

    Only rank 0 has sinks and a summary.
    """
    directory = started.directory
    step = started.restored.step if started.restored else None
    if step is not None and training.finished and not started.lacks_its_end:
        raise nothing_left(directory.path, step)
    with directory.held() if is_first else nullcontext():
        if started.goes_back:
            # before `begin` removes later records: the restored checkpoint must be the newest on disk
            training.saver.save_again(episode=training.ledger.epoch)
        started.begin()
        for sink in sinks:
            sink.start(RunInfo(directory.path.name, directory.path, resolved.values, step))
        outcome = "interrupted"
        try:
            with training.saver:
                yield
            outcome = "finished" if training.finished else outcome
        finally:
            # before the summary: it is computed from the rows on disk
            directory.sync()
            summary = summary_of(directory, resolved, outcome) if is_first else {}
            for sink in sinks:
                sink.finish(summary)


def nothing_left(path: Path, step: int) -> CheckpointError:
    """The error of a resume that would train nothing."""
    return CheckpointError(
        code="run.finished",
        what=f"nothing is left to do: the run is at step {step}, its last",
        where=str(path),
        why="a resume that trains nothing would look like one that worked",
        state=f"the run is complete at {path}",
        do=f"rft-train eval {path}",
    )


def summary_of(directory: RunDirectory, resolved: Resolved[Any], outcome: str) -> dict[str, Any]:
    """Return the content of summary.json, from the run's metrics and evaluations."""
    rows = directory.read_metrics().rows
    evaluations = directory.read_evaluations().rows
    last = rows[-1] if rows else {}
    summary: dict[str, Any] = {
        "outcome": outcome,
        "command": resolved.command,
        "recipe": resolved.recipe_name,
        "seed": resolved.settings.run.seed,
        "steps": last.get("step", 0),
        "seconds": max([row.get("time/elapsed") or 0.0 for row in (*rows, *evaluations)], default=0.0),
        "tokens": last.get("data/tokens", 0),
        "eval": {},
    }
    for name in ("before", "after"):
        row = next((r for r in reversed(evaluations) if r.get("name") == name), None)
        if row is not None:
            summary["eval"][name] = {
                key.removeprefix("eval/"): value for key, value in row.items() if key.startswith("eval/")
            } | {"step": row["step"]}
    return summary


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run that has ended."""

    directory: RunDirectory
    summary: dict[str, Any] | None
    """summary.json; None on every rank but the first."""


def trained_run(started: RunStart, machine: Machine) -> TrainedRun:
    """The ended run as its first rank reads it."""
    return TrainedRun(started.directory, started.directory.read_summary() if machine.is_first else None)


def final_model(path: Path) -> Path:
    """The newest checkpoint's complete Hugging Face directory."""
    steps = sorted((path / "checkpoints").glob("step_*/model"))
    return steps[-1] if steps else path / "checkpoints"
