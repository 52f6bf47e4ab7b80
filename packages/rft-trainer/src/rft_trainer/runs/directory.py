"""Run directory: its files by name, how they are written, and how they are cut back for a resume.

All code that shows, resumes, reports or compares a run reads this directory alone. One process writes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_core.durable_files import (
    LineAppender,
    Records,
    encode_record,
    read_records,
    remove_file,
    replace_record,
    replace_text,
    storage_errors,
)
from rft_core.errors import CheckpointError, DataError, OptionsError, StorageError
from rft_trainer.runs.names import free_name
from rft_trainer.runs.optional_files import OptionalFiles

RUN_MARKS = ("config.yaml", "metrics.jsonl", "evals.jsonl", "summary.json", "checkpoints", "rollouts")
"""What a run directory has, and no other."""
_OF_A_START = {*RUN_MARKS, "recipe.yaml", "command.txt", "env.json", "error.json", "restarts.json", "logs"}
"""What a run that ended before its first step may leave; bundles of diagnostics are beside them."""
_ROLLOUT_FILE = re.compile(r"step_(\d{6,})\.jsonl")
_TOKEN_FILE = re.compile(r"tokens_(\d{6,})\.arrow")


@dataclass(frozen=True, slots=True)
class CutReport:
    """Number of records and files that `RunDirectory.cut_after` removed."""

    metrics: int
    evaluations: int
    rollout_files: int
    unreadable_lines: int
    """Torn or damaged lines, removed as well."""


class RunDirectory:
    """One run on disk; make it with `create` or `open`.

    Layout: config.yaml, recipe.yaml, command.txt, env.json, metrics.jsonl (a record a step),
    evals.jsonl, rollouts/step_000010.jsonl, logs/rank_0.log, checkpoints/, summary.json.
    """

    def __init__(self, path: Path, *, sync_every: int = 1) -> None:
        self.path = path
        self.optional = OptionalFiles()
        self._metrics = LineAppender(self.metrics_file, sync_every=sync_every)
        self._evaluations = LineAppender(self.evaluations_file, sync_every=sync_every)
        self._numerics = LineAppender(self.numerics_file, sync_every=1)

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        config_text: str,
        command: Sequence[str],
        environment: Mapping[str, Any],
        recipe_text: str | None = None,
        resume_command: str | None = None,
        sync_every: int = 1,
        again: bool = False,
    ) -> RunDirectory:
        """Create a run at `path`, where no run exists yet, or `again` one that ended before its first save.

        `config_text` and `recipe_text` are YAML as the caller wrote it, `command` the argument
        list, `environment` JSON. `sync_every` is the number of metric lines between two fsyncs.
        Raises `OptionsError` where a run is already, naming the command that resumes it
        (`resume_command`); `StorageError` where the disk refuses.
        """
        run = cls(Path(path).expanduser(), sync_every=sync_every)
        # before the first folder is made, so that a refusal leaves nothing behind
        if again:
            run.cut_after(-1)  # an evaluation before the first step: it is made again
        else:
            run.refuse_existing(resume_command)
        with storage_errors("make", run.path):
            for directory in (run.path, run.rollouts_directory, run.logs_directory, run.checkpoints_directory):
                directory.mkdir(parents=True, exist_ok=True)
        replace_text(run.path / "command.txt", shlex.join(command) + "\n")
        replace_record(run.path / "env.json", environment)
        if recipe_text is not None:
            replace_text(run.path / "recipe.yaml", recipe_text)
        replace_text(run.config_file, config_text)  # last: `open` takes a directory with it for a run
        return run

    @classmethod
    def open(cls, path: str | Path, *, sync_every: int = 1) -> RunDirectory:
        """Open an existing run, to be read or continued; `CheckpointError` where there is none."""
        run = cls(Path(path).expanduser(), sync_every=sync_every)
        if not run.config_file.is_file():
            raise not_a_run(run.path)
        return run

    @contextmanager
    def held(self) -> Generator[None]:
        """Lock the run against every other writing process while the block runs; a kill releases the lock.

        Raises `StorageError` where another process holds it.
        """
        with storage_errors("hold", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # the folder itself is locked: there is no lock file that could be left behind or copied
            directory = os.open(self.path, os.O_RDONLY)
        try:
            # again, because whoever lists runs holds each for an instant to see whether it is free
            for patience in (0.05, 0.2, None):
                try:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if patience is None:
                        raise _in_use(self.path) from None
                    time.sleep(patience)
            yield
        finally:
            # closing releases the lock
            os.close(directory)

    def refuse_live(self) -> None:
        """Raise `StorageError` where another process is writing the run."""
        if self.path.is_dir():
            with self.held():
                return

    def has_rows(self) -> bool:
        """Return whether the run has trained: it has rows of metrics or rollouts.

        An evaluation before the first step can be had again.
        """
        files = (self.metrics_file, *self.rollouts_directory.glob("*.jsonl"))
        return any(file.is_file() and file.stat().st_size > 0 for file in files)

    def is_mere_start(self) -> bool:
        """Return whether nothing is lost with the directory: a run began in it, and wrote no row and no checkpoint.

        A file of anybody else, a checkpoint in quarantine or the row of an evaluation is something to be kept.
        """
        if not (self.path / "command.txt").is_file() or self.has_rows():
            return False
        kept = (
            [self.evaluations_file] if self.evaluations_file.is_file() and self.evaluations_file.stat().st_size else []
        )
        folders = (self.checkpoints_directory, self.rollouts_directory)
        kept += [entry for folder in folders if folder.is_dir() for entry in folder.iterdir() if entry.name[0] != "."]
        kept += [e for e in self.path.iterdir() if e.name not in _OF_A_START and not e.name.startswith("bundle-")]
        return not kept

    def refuse_existing(self, resume_command: str | None = None, *, marks: Sequence[str] = RUN_MARKS) -> None:
        """Raise `OptionsError` where a run is already, naming the command that resumes it, or where a model lies.

        `marks` are the names of files and folders that only a run has.
        """
        present = [name for name in marks if (self.path / name).exists()]
        if present:
            raise _already_there(self.path, present, resume_command)
        if (self.path / "config.json").is_file() or any(self.path.glob("*.safetensors")):
            raise _is_a_model(self.path)

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations_file(self) -> Path:
        return self.path / "evals.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def rollouts_directory(self) -> Path:
        return self.path / "rollouts"

    @property
    def logs_directory(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints_directory(self) -> Path:
        return self.path / "checkpoints"

    @property
    def numerics_file(self) -> Path:
        return self.path / "numerics.jsonl"

    def rollout_file(self, step: int) -> Path:
        """Return the file of the rollouts of a step."""
        return self.rollouts_directory / f"step_{step:06d}.jsonl"

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append the metrics record of a step, flat slash names; it must have an integer "step"."""
        _step_of(record)
        self._metrics.append(record)

    def append_evaluation(self, record: Mapping[str, Any]) -> None:
        """Append the record of an evaluation; it must have the integer "step" after which it was made."""
        _step_of(record)
        self._evaluations.append(record)

    def append_numerics(self, record: Mapping[str, Any]) -> None:
        """Append what a numeric guard found in a step; the file is there only where it found something."""
        _step_of(record)
        self._numerics.append(record)

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write the rollouts of a step, one a line; a file of the same step is replaced."""
        file = self.rollout_file(step)
        replace_text(file, "".join(encode_record(record) + "\n" for record in records))
        return file

    def read_metrics(self) -> Records:
        return read_records(self.metrics_file)

    def read_evaluations(self) -> Records:
        return read_records(self.evaluations_file)

    def rollout_steps(self) -> list[int]:
        """Return the steps whose rollouts were kept, in order."""
        return sorted(_steps_of(self.rollouts_directory, _ROLLOUT_FILE))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write outcome, seed, seconds, steps, tokens, evaluation before and after; the file is replaced atomically."""
        replace_record(self.summary_file, summary)

    def read_summary(self) -> dict[str, Any] | None:
        """Read the summary, or None where none was written; `DataError` where it is damaged."""
        if not self.summary_file.exists():
            return None
        with storage_errors("read", self.summary_file):
            raw = self.summary_file.read_bytes()
        try:
            summary = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _bad_summary(self.summary_file, str(error)) from error
        if not isinstance(summary, dict):
            raise _bad_summary(self.summary_file, f"it is a {type(summary).__name__}")
        return summary

    def cut_after(self, step: int) -> CutReport:
        """Remove the records after the checkpoint of `step`, so that a resume writes them once.

        Keeps records of steps up to and including `step`. Files are rewritten at once or left as
        they are; a second call finds nothing more to do.
        """
        # the appenders hold the old files open, which are replaced below
        self.close()
        metrics, bad_metrics = _cut(self.metrics_file, step)
        evaluations, bad_evaluations = _cut(self.evaluations_file, step)
        _cut(self.numerics_file, step)
        late = [kept for kept in self.rollout_steps() if kept > step]
        for kept in late:
            remove_file(self.rollout_file(kept))
        for kept, file in _steps_of(self.rollouts_directory, _TOKEN_FILE).items():
            if kept > step:
                remove_file(file)
        if self.summary_file.exists():  # of an end that this run no longer has
            remove_file(self.summary_file)
        return CutReport(metrics, evaluations, len(late), bad_metrics + bad_evaluations)

    def sync(self) -> None:
        """Make every record durable; call it before a checkpoint is published."""
        self._metrics.sync()
        self._evaluations.sync()
        self._numerics.sync()

    def close(self) -> None:
        """Sync and close the files; safe to call twice."""
        self._metrics.close()
        self._evaluations.close()
        self._numerics.close()


def _step_of(record: Mapping[str, Any]) -> int:
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f'a record needs an integer "step" of at least 0, not {step!r}')
    return step


def _steps_of(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    return {int(match[1]): file for file in files if (match := pattern.fullmatch(file.name))}


def _cut(file: Path, step: int) -> tuple[int, int]:
    """Rewrite a file of records up to `step`; return the numbers of late and of unusable lines removed."""
    records = read_records(file)
    # a row without a step cannot be placed before or after the checkpoint
    dated = [row for row in records.rows if isinstance(row.get("step"), int)]
    kept = [row for row in dated if row["step"] <= step]
    num_bad = records.num_unreadable + int(records.torn) + len(records.rows) - len(dated)
    num_late = len(dated) - len(kept)
    # a file that is as it should be is not touched
    if num_late or num_bad:
        replace_text(file, "".join(encode_record(row) + "\n" for row in kept))
    return num_late, num_bad


def is_held(path: Path) -> bool:
    """Return whether a process of this machine is writing the run at `path`."""
    try:
        directory = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(directory)
    return False


def _already_there(path: Path, files: Sequence[str], resume_command: str | None) -> OptionsError:
    return OptionsError(
        code="run.exists",
        what=f"{path} already holds a run: {', '.join(files)}",
        where="--save_path",
        why="a fresh start never writes over an earlier run",
        state="the earlier run is untouched; nothing was started",
        do=resume_command or f"rft-train resume {shlex.quote(str(path))}",
    )


def _is_a_model(path: Path) -> OptionsError:
    return OptionsError(
        code="run.holds_a_model",
        what=f"{path} is the directory of a model",
        where="--save_path",
        why="files of a run among those of a model would be taken for parts of it",
        state="the model is untouched; nothing was started",
        do=f"--save_path {shlex.quote(str(free_name(path)))}",
    )


def _in_use(path: Path) -> StorageError:
    return StorageError(
        code="run.in_use",
        what=f"another process is writing the run at {path}",
        where=str(path),
        why="two writers would destroy each other's records and checkpoints",
        state="this process changed nothing; the other one goes on",
        do=f"fuser -v {shlex.quote(str(path))}",
    )


def not_a_run(path: Path) -> CheckpointError:
    """Return the error of a path that holds no run."""
    there = "does not exist"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())[:10]
        there = f"holds {', '.join(names)}" if names else "is empty"
    elif path.exists():
        there = "is a file"
    # its checkpoints, or one of them
    around = next((folder for folder in list(path.parents)[:2] if (folder / "config.yaml").is_file()), None)
    return CheckpointError(
        code="run.not_found",
        what=f"no run at {path}: it {there}",
        where=str(path),
        why=f"a run directory has a config.yaml{f'; it is part of the run {around}' if around else ''}",
        do=f"rft-train resume {shlex.quote(str(around))}"
        if around
        else f"rft-train runs {shlex.quote(str(path.parent))}",
    )


def _bad_summary(file: Path, why: str) -> DataError:
    return DataError(
        code="run.bad_summary",
        what=f"{file} is not readable: {why}",
        where=f"{file}:1",
        why="a summary is one JSON object",
        do=f"mv {file} {file}.damaged",
    )
