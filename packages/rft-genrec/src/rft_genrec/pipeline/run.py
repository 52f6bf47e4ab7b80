"""`rft-train genrec run`: each stage as its own command, passed over where its options and inputs are unchanged."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rft.resolved import Resolved
from rft_core.checkpoint_places import step_directories
from rft_core.errors import DataError
from rft_genrec.pipeline.manifest import StageManifest, files_below, manifest_of, store, stored, written
from rft_genrec.pipeline.stages import COPY, Stage, copy_catalogue, filled, stages_of
from rft_genrec.settings.run import GenrecRunSettings

StartCommand = Callable[[Sequence[str]], Generator[str, None, int]]
"""Runs `rft-train WORDS...`, yields what it prints, and returns its exit code."""
_KEPT = "finished stages are kept; the next call goes on with this one"


def run(resolved: Resolved[GenrecRunSettings]) -> Iterator[str]:
    """Run the stages that settings choose; yields what a person sees.

    Raises:
        DataError: a stage has ended with an error; the stages before it are kept.
    """
    return run_stages(resolved.settings, command_lines)


def run_stages(settings: GenrecRunSettings, start: StartCommand) -> Iterator[str]:
    """Run the stages, each by `start`."""
    folder = Path(settings.pipeline.save_path).expanduser().resolve()
    stages = stages_of(settings)
    folder.mkdir(parents=True, exist_ok=True)
    for number, stage in enumerate(stages, start=1):
        title = f"stage {number} of {len(stages)}, {stage.name}"
        now, before = manifest_of(stage, folder), stored(folder, stage.name)
        if before is not None and before.writes and now.same_as(before) and written(stage, folder) == before.writes:
            yield f"{title}: options and inputs are unchanged, passed over"
            continue
        yield f"{title}: {_reason(now, before)}"
        yield from _run_stage(stage, folder, now, goes_on=before is not None and now.same_as(before), start=start)
    yield f"all {len(stages)} stages are finished: {folder}"


def _reason(now: StageManifest, before: StageManifest | None) -> str:
    if before is None:
        return "begins"
    if not now.same_as(before):
        return f"begins again, since {now.difference(before)}"
    return "begins again, since what it had written is gone or changed" if before.writes else "had not ended"


def _run_stage(stage: Stage, folder: Path, now: StageManifest, *, goes_on: bool, start: StartCommand) -> Iterator[str]:
    target = folder / stage.target
    words = filled(stage, folder)
    if goes_on and stage.kind == "run" and _can_continue(target):
        words = ["resume", str(target)]
    elif not (goes_on and (stage.kind == "results" or (stage.kind == "run" and _is_finished(target)))):
        yield from _cleared(stage, folder)
    # before it begins: a later call finds out from it that the stage had begun, and with what
    store(folder, stage.name, now)
    if stage.name == COPY:
        copy_catalogue(Path(stage.words[1]), target)
    elif not (stage.kind == "run" and _is_finished(target)):
        yield f"  {shlex.join(['rft-train', *words])}"
        code = yield from start(words)
        if code:
            raise _failed(stage, code, words)
    writes = written(stage, folder)
    if not writes:
        raise DataError(
            code="genrec.stage_wrote_nothing",
            what=f"the stage {stage.name} has ended, and none of {', '.join(stage.writes)} is there",
            where=str(folder),
            why="later stages read these files",
            state=_KEPT,
            do=f"--{stage.name}_options without another directory for its files",
        )
    store(folder, stage.name, replace(now, writes=writes))


def _cleared(stage: Stage, folder: Path) -> Iterator[str]:
    """Take what an earlier call has left out of the way: a run is set aside, other files are removed."""
    target = folder / stage.target
    if stage.kind == "run" and target.exists():
        number = 1
        while (aside := target.with_name(f"{target.name}-{number}")).exists():
            number += 1
        target.rename(aside)
        yield f"  the earlier run is now {aside}"
    elif stage.kind in ("directory", "results"):
        shutil.rmtree(target, ignore_errors=True)
    elif stage.kind == "files":
        for file in files_below(folder, stage.writes):
            file.unlink()


def _can_continue(target: Path) -> bool:
    saved = step_directories(target / "checkpoints")
    return not _is_finished(target) and any((path / "manifest.json").is_file() for path in saved)


def _is_finished(target: Path) -> bool:
    try:
        return json.loads((target / "summary.json").read_text(encoding="utf-8")).get("outcome") == "finished"
    except (OSError, ValueError, AttributeError):
        return False


def _failed(stage: Stage, code: int, words: Sequence[str]) -> DataError:
    return DataError(
        code="genrec.stage_failed",
        what=f"the stage {stage.name} has ended with exit code {code}",
        where=shlex.join(["rft-train", *words]),
        why="its own error stands above",
        state=_KEPT,
        do="mend what its error names, then the same command",
    )


def command_lines(words: Sequence[str]) -> Generator[str, None, int]:
    """Run `rft-train WORDS...` in a process of its own; yields its lines, returns its exit code."""
    command = [sys.executable, "-m", "rft_cli.main", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            with _signals_to(process):
                for line in process.stdout:
                    yield line.rstrip("\n")
        finally:
            if process.poll() is None:
                process.terminate()
        return process.wait()


@contextmanager
def _signals_to(process: subprocess.Popen[str]) -> Generator[None]:
    """Hand SIGTERM on to the stage, which saves and ends; without it the stage would outlive this process."""

    def hand_on(number: int, frame: object) -> None:
        process.send_signal(number)

    earlier = signal.signal(signal.SIGTERM, hand_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
