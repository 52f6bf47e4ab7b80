"""Start and end of a training run: its directory, the checkpoint it continues from, its sinks, its summary."""

from __future__ import annotations

import logging
import os
import platform
import shlex
import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from rft.checkpoints.writer import ResumePoint, refuse_model_only
from rft.front_end import SILENT, FrontEnd
from rft.identity.changes import Facts, RunRecord, continued_record, new_record, refuse_changed
from rft.identity.continuation import Continuation, new_run, nothing_left
from rft.identity.rank_agreement import require_equal_contents
from rft.identity.record import Content
from rft.process.detached import run_has_begun
from rft.process.machine import Machine
from rft.process.restarts import end_without_progress
from rft.process.rollbacks import going_back
from rft.resolved import Resolved
from rft_core.checkpoint_places import run_of, step_directories
from rft_core.errors import CheckpointError, OutageError, RftError
from rft_dist.checkpoint_format.layout import CHECKPOINTS, MODEL, leftovers, places, published
from rft_dist.checkpoint_format.manifest import ManifestFault
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_dist.checkpoints.reader import read_manifest
from rft_dist.launch.environment import environment_report
from rft_dist.launch.supervise import note_run
from rft_dist.settings import CheckpointSettings
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.health.watch import replay
from rft_trainer.metrics.sink import RunInfo, Sink
from rft_trainer.runs.bottleneck import micro_batch_of, speed_verdict
from rft_trainer.runs.checkpointing import Progress, Saver, save_in_outage
from rft_trainer.runs.directory import RUN_MARKS, RunDirectory
from rft_trainer.runs.names import RUNS, free_name, point_to_latest, refuse_file, run_name
from rft_trainer.runs.reader import read_run
from rft_trainer.runs.rollback import Rollback, RollbackRequested
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.runs.verdict import evidence_of, unwritten, verdict
from rft_trainer.settings.run import RunSettings
from rft_trainer.sinks.findings import FindingSink
from rft_trainer.sinks.jsonl import JsonlSink
from rft_trainer.sinks.profile.requested import requested_profile
from rft_trainer.sinks.trackers import requested_trackers

_LOG = logging.getLogger(__name__)
_OURS = ("rft-core", "rft-algos", "rft-models", "rft-dist", "rft-engine", "rft-trainer", "rft")
_PACKAGES = ("torch", "transformers", "safetensors", *_OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """A run whose directory is chosen and whose checkpoint, if any, is found; nothing is written before `begin`."""

    resolved: Resolved[Any]
    command: Sequence[str]
    """What is written into the run directory as the way to start it again."""
    machine: Machine
    front: FrontEnd
    directory: RunDirectory
    restored: ResumePoint | None
    """The checkpoint that the run continues from."""
    in_place: bool
    """Whether it is one of this very run, which goes on in its own directory."""
    resume_command: str
    sinks: Sequence[Sink]
    """Sinks of the first rank; the others have none."""
    lacks_its_end: bool
    """Whether the run goes on in its own directory and has not said that it finished: a kill after the last
    checkpoint leaves a run with nothing to train and no summary."""
    goes_back: bool
    """Whether later checkpoints stand beside the one that it continues from, or it goes on without some rows: that one
    is saved again before later records are taken away, so that it is the newest for whoever resumes next."""
    record: RunRecord
    """What decides the run's result, for its directory and its checkpoints."""
    begins_again: bool = False
    """Whether the directory is that of a run which ended before its first save, and is begun anew."""

    def begin(self) -> None:
        """Write the directory's first files, or cut it back to the checkpoint: once everything else is built."""
        run_has_begun()
        if not self.machine.is_first:
            return
        self.machine.forget_last_failure()
        if self.in_place and self.restored is not None:
            # rows after the checkpoint are done again
            _cut_back(self.directory, self.restored.step)
        else:
            RunDirectory.create(
                self.directory.path,
                config_text=self.resolved.config_yaml,
                command=self.command,
                environment=environment(self.machine),
                recipe_text=self.resolved.sources[-1].read_text() if self.resolved.sources else None,
                resume_command=self.resume_command,
                again=self.begins_again,
            )
        # after the cut, so that what is refused until there leaves the record as it was
        self.record.write(self.directory.path)
        point_to_latest(self.directory.path)
        note_run(self.directory.path, os.environ)
        self.front.run_begins(self.directory.path)

    def metadata(self, data_hash: str) -> dict[str, object]:
        """Return the run's metadata, part of every checkpoint manifest."""
        return {
            "command": self.resolved.command,
            "data_sha256": data_hash,
            "seed": self.resolved.settings.run.seed,
            "versions": versions(),
            **self.record.metadata(),
        }


def start(
    at: Continuation,
    command: Sequence[str],
    machine: Machine,
    num_steps: int,
    facts: Facts,
    *,
    in_place: Path | None = None,
    script: str = "",
    front: FrontEnd = SILENT,
) -> RunStart:
    """Choose the run's directory, find the checkpoint to continue from, and make the sinks.

    `facts` are what `compared_facts` found.

    `RunStart.begin` makes the first change on disk. A part that cannot be built (a reward, an engine, a tracker) so
    fails before anything is written, and the mended command starts in the same place. `in_place` is the directory of
    a run that is continued from its newest checkpoint. With `--load_checkpoint` a checkpoint of this very run is
    continued in place too; one of another run starts a new directory. `script` is the program whose code is part of
    the run, where there is one.
    """
    resolved = at.resolved
    checkpoint: CheckpointSettings = resolved.settings.checkpoint
    path = in_place or _choose_path(resolved, machine)
    directory = RunDirectory(path, sync_every=_SYNC_EVERY)
    restored, begins_again = None, False
    source = in_place or (Path(checkpoint.ckpt_path or path) if checkpoint.load_checkpoint else None)
    if source is not None:
        name = "ckpt_path" if checkpoint.ckpt_path else "load_checkpoint"
        asked_by = "rft-train resume" if in_place else f"--{name}"
        restored = _find(source, directory, asked_by=asked_by, machine=machine, origin=str(resolved.origins[name]))
        begins_again = restored is None
    continues = restored is not None and (in_place is not None or _belongs_to(restored, path))
    resume_command = continued_by(script, path) if script else f"rft-train resume {path}"
    if checkpoint.save_model_only:  # no state to continue from: a new run begins with the weights
        resume_command = new_run(resolved, path)
    if restored is not None:
        refuse_model_only(restored.checkpoint, new_run(resolved, run_of(restored.checkpoint.path)))
    if machine.is_first and not continues and not begins_again:
        refuse_existing(path, resume_command)
    if continues and restored is not None:
        record = continued_record(at, facts, path, restored.step)
        restored = replace(restored, other_rows=record.other_rows)
    else:
        record = new_record(resolved, facts)
    # from here on a failure leaves its files in the directory of the run
    machine.attach(path, resume_command)
    front.run_chosen(path)
    # now, because `begin` changes the files from which these follow
    lacks_its_end = continues and _lacks_its_end(directory, machine)
    goes_back = continues and restored is not None and _has_later(directory, restored)
    sinks: list[Sink] = []
    if machine.is_first:
        run: RunSettings = resolved.settings.run
        sinks = [JsonlSink(directory), *front.make_sinks(run, num_steps)]
        sinks += [FindingSink(directory, resolved.command, run.on_alarm, micro_batch_of(resolved.values))]
        sinks += requested_trackers(run, directory.optional)
        place = (machine.device, machine.ranks.world_size)
        sinks += requested_profile(run, directory.optional, resolved.values, resolved.command, *place)
    return RunStart(
        resolved=resolved,
        # a run that begins again by a resume keeps the command that made it
        command=shlex.split(_first_command(path)) if begins_again and in_place else command,
        machine=machine,
        front=front,
        directory=directory,
        restored=restored,
        in_place=continues,
        resume_command=resume_command,
        sinks=sinks,
        lacks_its_end=lacks_its_end,
        goes_back=goes_back,
        record=record,
        begins_again=begins_again,
    )


def compared_facts(at: Continuation, machine: Machine, contents: Mapping[str, Content]) -> Facts:
    """Return what a start finds beside its settings, once ranks and record agree on it; all ranks call it.

    Raises:
        PreflightError: rows, files or code of a rank are not those of rank 0.
        DataError: they are not those of the run that goes on, and nobody asked for it.
    """
    require_equal_contents(machine.collectives, contents)
    # the kind of device: its number is another one on every rank
    kind = machine.device.partition(":")[0]
    facts = Facts(contents, versions(), {"device": kind, "world_size": machine.ranks.world_size})
    refuse_changed(at, facts)
    return facts


def _choose_path(resolved: Resolved[Any], machine: Machine) -> Path:
    """The directory of a new run, the same on every rank."""
    if resolved.settings.checkpoint.save_path:
        return Path(resolved.settings.checkpoint.save_path).expanduser()
    name = resolved.settings.run.run_name or run_name(resolved.recipe_name or resolved.command, under=RUNS)
    # a name depends on the time and on what exists, so one rank chooses it
    agreed = machine.collectives.broadcast_bytes(name.encode() if machine.is_first else None)
    return RUNS / agreed.decode()


def refuse_existing(path: Path, resume_command: str | None = None) -> None:
    """Raise `OptionsError` where `path` holds a run: it is continued, or removed where it has saved nothing.

    One that is being written is `StorageError`: before its first save it looks like one that has saved nothing. One
    with records and no checkpoint is left alone, since its checkpoints may lie on a disk that is not mounted, and so is
    one with anything else in it that is not of a run's start.
    """
    refuse_file(path)
    directory = RunDirectory(path)
    if published(directory.checkpoints_directory):
        remedy = resume_command
    else:
        if any((path / mark).exists() for mark in RUN_MARKS):
            directory.refuse_live()
        remedy = remove(path) if directory.is_mere_start() else f"--save_path {shlex.quote(str(free_name(path)))}"
    directory.refuse_existing(remedy)


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


_SYNC_EVERY = 100
"""Rows between two fsyncs: a checkpoint syncs before it is published, and what comes after it is done again anyway."""


def _find(source: Path, directory: RunDirectory, *, asked_by: str, machine: Machine, origin: str) -> ResumePoint | None:
    """Find the checkpoint to continue from: rank 0 verifies and quarantines, the others open the one it chose.

    None on all ranks where `source` is the run itself, and it ended before its first save: it begins again.
    """
    if machine.is_first:
        if source == directory.path and _ended_unsaved(directory):
            _LOG.warning("%s ended before its first save: the run begins again from its start", source)
            machine.collectives.broadcast_bytes(b"")
            return None
        resolved = resolve_checkpoint(source, asked_by=asked_by, origin=origin)
        for finding in resolved.findings:
            _LOG.warning("skipped a damaged checkpoint: %s" if finding.file or finding.is_damage else "%s", finding)
        # rank 0 alone may move damaged checkpoints, so the others wait for its choice
        machine.collectives.broadcast_bytes(str(resolved.checkpoint.path).encode())
        return ResumePoint(resolved.checkpoint)
    chosen = machine.collectives.broadcast_bytes(None).decode()
    if not chosen:
        return None
    return ResumePoint(resolve_checkpoint(Path(chosen), asked_by=asked_by, origin=origin).checkpoint)


def _ended_unsaved(directory: RunDirectory) -> bool:
    """Return True where the run of this directory ended before its first save, as a requeued job finds it.

    The first save is written while the first steps run, so that rows may be there: what a killed process left of that
    save tells it from a run whose checkpoints were moved, or whose disk is not mounted. The steps are done again.
    """
    path, folder = directory.path, directory.checkpoints_directory
    # the first file of a run: a folder without it is another program's, and nothing is written over its files
    if not (path / "command.txt").is_file():
        return False
    if published(folder) or any(folder.glob("quarantine_*")):
        return False
    directory.refuse_live()
    if not directory.has_rows() or any(left.step == 0 for left in leftovers(folder)):
        return True
    raise CheckpointError(
        code="run.checkpoints_missing",
        what=f"{path} holds the records of a run that trained, and no checkpoint",
        where=str(folder),
        why="a run is continued from a checkpoint, and saves one before its first step: they were moved or deleted, or "
        "their disk is not mounted",
        state="nothing was started and nothing was changed",
        do=_elsewhere(_first_command(path), free_name(path)),
    )


def _first_command(path: Path) -> str:
    file = path / "command.txt"
    return file.read_text().strip() if file.is_file() else "rft-train"


def _elsewhere(command: str, path: Path) -> str:
    """Return the command with another directory for its run."""
    words = shlex.split(command)
    if "--save_path" in words[:-1]:
        words[words.index("--save_path") + 1] = str(path)
    else:
        words += ["--save_path", str(path)]
    return shlex.join(words)


def _belongs_to(restored: ResumePoint, path: Path) -> bool:
    # in the folder of the run, or in one of those to which saves went that it refused
    return restored.checkpoint.path.parent.resolve() in {place.resolve() for place in places(path / CHECKPOINTS)}


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
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "device": machine.device,
        "world_size": machine.ranks.world_size,
        "torch_threads": torch.get_num_threads(),
        "versions": versions(),
        "variables": [list(row) for row in environment_report()],
    }


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run that has ended."""

    directory: RunDirectory
    summary: dict[str, Any] | None
    """summary.json; None on every rank but the first."""


class Training(Protocol):
    """A training loop that is built and ready to run."""

    @property
    def finished(self) -> bool: ...
    @property
    def saver(self) -> Saver: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def progress(self) -> Progress: ...
    def run(self, signals: StopSignals) -> object: ...


def execute(
    training: Training, started: RunStart, signals: StopSignals, rollback: Rollback | None = None
) -> TrainedRun:
    """Train from the beginning of the run, or from where a rollback led, to its end; raises `RollbackRequested`."""
    if rollback is not None:
        rollback.apply(training.progress)
        # saved again at once: whoever resumes after a kill has the rows left out as well
        started = replace(started, goes_back=True)
    settings = started.resolved.settings
    # a checkpoint of the model alone is none to go back to
    limit = 0 if settings.checkpoint.save_model_only else settings.run.max_rollbacks
    with running(training, started), going_back(training, started, limit):
        training.run(signals)
    return TrainedRun(started.directory, started.directory.read_summary() if started.machine.is_first else None)


@contextmanager
def running(training: Training, started: RunStart) -> Generator[None]:
    """Begin the directory, and at the end of the block write the outcome, whatever happened in it.

    Only rank 0 has sinks and a summary.
    """
    directory, is_first = started.directory, started.machine.is_first
    step = started.restored.step if started.restored else None
    # a run killed between its last checkpoint and the summary goes through to write the summary
    if step is not None and training.finished and not started.lacks_its_end:
        raise nothing_left(directory.path, step, started.resolved.values)
    if started.in_place or started.begins_again:
        end_without_progress(directory.path, step, os.environ, started.machine.collectives, is_first=is_first)
    with directory.held() if is_first else nullcontext():
        if started.goes_back:
            # before `begin` removes later records: the restored checkpoint must be the newest on disk
            training.saver.save_again(episode=training.ledger.epoch)
        started.begin()
        for sink in started.sinks:
            sink.start(RunInfo(directory.path.name, directory.path, started.resolved.values, step))
        # the summary says this unless the block below comes to its end
        outcome = "interrupted"
        try:
            # leaving it waits for the save under way, so a run is finished only with its last checkpoint
            with training.saver:
                try:
                    yield
                except OutageError as outage:
                    save_in_outage(
                        training.saver,
                        outage,
                        training.progress,
                        started.machine.collectives,
                        episode=training.ledger.epoch,
                        resume_command=started.resume_command,
                    )
            outcome = "finished" if training.finished else outcome
        except RollbackRequested:
            outcome = "rolled back"
            raise
        except RftError as error:  # of the save under way too
            at = "after its last step" if training.finished else f"in step {training.progress.step + 1}"
            error.tell_state(f"the run in {directory.path} stopped {at}; its checkpoints stay")
            raise
        finally:
            # before the summary: it is computed from the rows on disk
            directory.sync()
            summary = summary_of(directory, started.resolved, outcome) if is_first else {}
            for sink in started.sinks:
                sink.finish(summary)


def summary_of(directory: RunDirectory, resolved: Resolved[Any], outcome: str) -> dict[str, Any]:
    """Return the content of summary.json, from the files of the run."""
    rows, evaluations = directory.read_metrics().rows, directory.read_evaluations().rows
    last = rows[-1] if rows else {}
    evidence = evidence_of(read_run(directory.path))
    found = [*verdict(evidence), *unwritten(directory.optional)]
    bound = speed_verdict(rows, resolved.command, micro_batch_of(resolved.values))
    summary: dict[str, Any] = {
        "outcome": outcome,
        "command": resolved.command,
        "recipe": resolved.recipe_name,
        "seed": resolved.settings.run.seed,
        "steps": last.get("step", 0),
        "seconds": max([row.get("time/elapsed") or 0.0 for row in (*rows, *evaluations)], default=0.0),
        "tokens": last.get("data/tokens", 0),
        "eval": {},
        "verdict": [finding.as_record() for finding in found],
        "health": [alarm.as_record() for alarm in replay(rows, evaluations, resolved.command, evidence.rollouts)],
        "speed": bound.as_record() if bound else None,
    }
    for name in ("before", "after"):
        row = next((r for r in reversed(evaluations) if r.get("name") == name), None)
        if row is not None:
            metrics = {key.removeprefix("eval/"): value for key, value in row.items() if key.startswith("eval/")}
            summary["eval"][name] = metrics | {"step": row["step"]}
    return summary


def final_model(path: Path) -> Path:
    """The newest checkpoint's complete Hugging Face directory."""
    models = [model for saved in step_directories(path / CHECKPOINTS) if (model := saved / MODEL).is_dir()]
    return models[-1] if models else path / CHECKPOINTS
