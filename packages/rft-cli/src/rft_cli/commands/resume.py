"""`rft-train resume RUN`: continue a run from its newest checkpoint that verifies."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from rft_cli.commands.quickstart import command as quickstart
from rft_cli.records.discovery import with_training
from rft_core.errors import OptionsError
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.reader import as_object, read_text

USAGE = """usage: rft-train resume RUN [OPTIONS]

Continue the run in directory RUN from its newest checkpoint that verifies, with the settings in its
config.yaml. The result is the same to the bit as that of a run that was never interrupted. An option
of the run's command given here replaces the stored one."""


def run(argv: list[str]) -> int:
    """Find the run's command, and continue the run in place."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    path, overrides = Path(argv[0]).expanduser().resolve(), argv[1:]
    started_by = quickstart.root_of(path)
    if started_by is not None:
        _go_to_working_directory(started_by)
        return quickstart.resume(started_by, overrides)
    directory = RunDirectory.open(path)
    refuse_code(directory)
    command = command_of(directory)
    # before the settings are resolved, because their paths are relative to it
    _go_to_working_directory(path)
    from rft.process.launching import spawned
    from rft_cli.config.resolve import resolve

    words = ["--config", str(directory.config_file), "--save_path", str(path), *overrides]
    command_line = ["rft-train", "resume", *argv]
    code = spawned(
        resolve(command, words), [sys.executable, "-m", "rft_cli.main", "resume", str(path), *overrides], run=path
    )
    if code is not None:
        return code
    from rft_cli.commands import training

    training.train(resolve(command, words), command_line, in_place=path)
    return 0


def command_of(directory: RunDirectory) -> str:
    """The verb that made the run."""
    recipe: Any = as_object(yaml.safe_load(directory.config_file.read_text())).get("recipe")
    command = as_object(recipe).get("command")
    if command not in with_training():
        raise OptionsError(
            code="resume.unknown_command",
            what=f"{directory.config_file} does not say which command made it (found {command!r})",
            where=f"{directory.config_file}: recipe.command",
            why=f"a run is continued by the command that started it: {', '.join(with_training())}",
            do=f"rft-train runs show {directory.path}",
        )
    return str(command)


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
    """Change to the directory in which the run was started: paths in its configuration are relative to it."""
    import json

    file = path / "env.json"
    recorded = json.loads(file.read_text()).get("working_directory") if file.is_file() else None
    if recorded and recorded != str(Path.cwd()) and Path(recorded).is_dir():
        print(f"paths are relative to {recorded}, where the run was started")
        os.chdir(recorded)
