"""`rft-train resume RUN`: continue a run from its newest checkpoint that verifies."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rft.config import yaml_file
from rft.config.errors import SettingsError
from rft.identity.storage import CONFIG, StoredRecord, config_bytes, read_record, reading, restore_config
from rft.resolved import Resolved
from rft_cli.commands.quickstart import command as quickstart
from rft_cli.config.resolve import resolve
from rft_cli.records.discovery import with_training
from rft_core.errors import CheckpointError, OptionsError, Problem
from rft_core.terminal_text import visible
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.ownership import other_owner, refuse_writable
from rft_trainer.runs.reader import as_object, read_text

USAGE = """usage: rft-train resume RUN [OPTIONS]

Continue the run in directory RUN from its newest checkpoint that verifies, with the settings in its
config.yaml. The result is the same to the bit as that of a run that was never interrupted. An option
of the run's command given here replaces the stored one, in every later resume too. What decides the
result and has changed underneath (config.yaml, a reward, a model, the rows) is refused by name, or
taken with --accept_changes NAME,..."""


def run(argv: list[str]) -> int:
    """Find the run's command, and continue the run in place."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    path, overrides = Path(argv[0]).expanduser().resolve(), argv[1:]
    _look_at_owner(path)
    recorded = _record_of(path)
    started_by = quickstart.root_of(path)
    if started_by is not None:
        _go_to_working_directory(started_by)
        return quickstart.resume(started_by, overrides)
    directory = RunDirectory.open(path)
    refuse_code(directory)
    command = command_of(directory, recorded)
    # before the settings are resolved, because their paths are relative to it
    _go_to_working_directory(path)
    from rft.process.launching import spawned

    resolved = _resolved(directory, recorded, command, overrides)
    command_line = ["rft-train", "resume", *argv]
    code = spawned(resolved, [sys.executable, "-m", "rft_cli.main", "resume", str(path), *overrides], run=path)
    if code is not None:
        return code
    from rft_cli.commands import training

    training.train(resolved, command_line, in_place=path)
    return 0


def _look_at_owner(path: Path) -> None:
    """Say whose run it is, before anything that its files name is run.

    Raises:
        OptionsError: every user of the machine can write it.
    """
    if not path.is_dir():
        return
    refuse_writable(path)
    owner = other_owner(path)
    if owner:
        print(visible(f"note: {path} is a run of the user {owner}; the code that its config.yaml names is run as you"))


def command_of(directory: RunDirectory, recorded: StoredRecord | None = None) -> str:
    """The verb that made the run.

    Raises:
        CheckpointError: config.yaml cannot be read as settings.
        OptionsError: it names no command that trains.
    """
    file = yaml_file.read(directory.config_file, {})
    if file.problems and (recorded is not None or not file.header):
        raise _damaged(directory, file.problems[0], recorded)
    command = file.header.get("command")
    if command not in with_training():
        raise OptionsError(
            code="resume.unknown_command",
            what=f"{directory.config_file} does not say which command made it (found {command!r})",
            where=f"{directory.config_file}: recipe.command",
            why=f"a run is continued by the command that started it: {', '.join(with_training())}",
            do=f"rft-train runs show {directory.path}",
        )
    return command


def _record_of(path: Path) -> StoredRecord | None:
    """Read the record of the run; a config.yaml that is not there is written again from it."""
    if not path.is_dir():
        return None
    recorded = read_record(path)
    if recorded is not None and restore_config(path, recorded):
        print(visible(f"{path / CONFIG} is written again, as {recorded.source.name} has it"))
    return recorded


def _resolved(
    directory: RunDirectory, recorded: StoredRecord | None, command: str, overrides: list[str]
) -> Resolved[Any]:
    """Resolve the settings of config.yaml and those that are given now.

    Raises:
        CheckpointError: config.yaml was changed since the program wrote it, and cannot be used.
        SettingsError: a setting that is given now cannot be used.
    """
    own = ["--config", str(directory.config_file), "--save_path", str(directory.path)]
    try:
        return resolve(command, [*own, *overrides])
    except SettingsError:
        text = config_bytes(directory.path)
        if recorded is None or text is None or recorded.config_is(text):
            raise
        try:
            resolve(command, own)
        except SettingsError as stored:
            raise _damaged(directory, stored.problems[0], recorded) from stored
        raise


def _damaged(directory: RunDirectory, problem: Problem, recorded: StoredRecord | None) -> CheckpointError:
    """The error of a config.yaml that is not what the program wrote, with the way back to it."""
    file = shlex.quote(str(directory.config_file))
    again = f"rft-train resume {shlex.quote(str(directory.path))}"
    if recorded is not None and recorded.config is not None:
        remedy = f"mv {file} {file}.damaged && {again}, which writes it again from {recorded.source.name}"
    else:
        remedy = "the command in command.txt, with --load_checkpoint and this --save_path"
    return CheckpointError(
        code="resume.config_damaged",
        what=f"{directory.config_file} was damaged or edited since the run wrote it: {problem.what}",
        where=problem.where,
        why=problem.why,
        state=f"nothing was started; {directory.path} is untouched",
        do=remedy,
    )


def refuse_code(directory: RunDirectory) -> None:
    """Refuse a run whose reward or algorithm is code of a script: only that script can continue it.

    Raises:
        OptionsError: the run was started by a script.
    """
    script = read_text(directory.path / "command.txt").strip()
    if not script.startswith("python"):
        return
    from rft.run_lifecycle import continued_by

    raise OptionsError(
        code="resume.from_code",
        what=f"{directory.path} was started by a script: {script}",
        where=str(directory.path / "command.txt"),
        why="its reward function or its trainer's methods are in that script, and a resume without them is another run",
        do=continued_by(script, directory.path),
    )


def _go_to_working_directory(path: Path) -> None:
    """Change to the directory in which the run was started: paths in its configuration are relative to it.

    Raises:
        CheckpointError: env.json is damaged.
    """
    import json

    file = path / "env.json"
    if not file.is_file():
        return
    with reading(
        file,
        code="resume.environment_damaged",
        why="it names the directory in which the run was started, to which its paths are relative",
        then="resume from the directory in which the run was started",
    ):
        recorded: Any = as_object(json.loads(file.read_bytes().decode("utf-8"))).get("working_directory")
    if isinstance(recorded, str) and recorded != str(Path.cwd()) and Path(recorded).is_dir():
        print(visible(f"paths are relative to {recorded}, where the run was started"))
        os.chdir(recorded)
