"""Commands by their names: the program's own and those of other packages, found without an import of torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from rft.config.command_record import Command, TrainingRecord
from rft.config.commands import PackageRecord, add_program, load, package_records
from rft.resolved import Resolved

BUILT_IN = "rft_cli.commands.table:BUILT_IN"
"""The program's own records, which are there without an installation too."""

TRAINING = "rft_cli.commands.training:run"
"""How every command with a record of training is run."""


ACTING = "rft_cli.commands.training:act"
"""How every command that acts on its settings is run."""


@cache
def commands() -> dict[str, Command]:
    """Every command by its name: the program's own first, then those of other packages.

    A record that cannot be used is in the list with its fault; no other command fails by it.
    """
    records: dict[str, Command] = {command.name: command for command in load(BUILT_IN)}
    for found in package_records():
        record = _of_package(found, taken=found.name in records)
        records[record.name] = record
    return {name: _completed(record, records) for name, record in records.items()}


def _completed(record: Command, records: dict[str, Command]) -> Command:
    """Return a record with what the command that it extends has."""
    if not record.extends:
        return record
    base = records.get(record.extends)
    return _unusable(record.name, f"there is no command {record.extends}") if base is None else record.completed(base)


def _of_package(found: PackageRecord, *, taken: bool) -> Command:
    """Return the command of another package; `taken` says that there is a command of its name already."""
    if taken:
        return _unusable(f"{found.name}@{found.package}", f"there is another command {found.name}")
    return _unusable(found.name, found.fault) if found.record is None else found.record


def _unusable(name: str, fault: str) -> Command:
    return Command(name=name, summary=f"cannot be used: {fault}", fault=fault)


def find_command(name: str) -> Command:
    """The record of a command that is known to exist."""
    return commands()[name]


def default_command() -> str:
    """The name of the command that is meant where none is named."""
    return next(command.name for command in commands().values() if command.is_default)


def with_settings() -> list[str]:
    """The names of the commands that have settings, and so flags, files and a reference page."""
    return [command.name for command in commands().values() if command.settings]


def with_training() -> list[str]:
    """The names of the commands that make runs by themselves."""
    return [command.name for command in commands().values() if command.training]


def training_of(name: str) -> TrainingRecord:
    """Return the training part of a command's record."""
    training = find_command(name).training
    assert training is not None, f"{name} trains nothing"
    return training


def prepared(training: TrainingRecord, resolved: Resolved[Any]) -> Resolved[Any]:
    """Return the settings of a command after what it makes of them before data and weights are read."""
    return load(training.prepare)(resolved) if training.prepare else resolved


def command_of_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the command that words begin with, and the words behind it: `genrec data` is `genrec-data`."""
    joined = "-".join(words[:2])
    if words[0] not in commands() and joined in commands():
        return joined, list(words[2:])
    return words[0], list(words[1:])


def run_command(command: Command, argv: Sequence[str]) -> int:
    """Run a command of any kind; returns its exit code."""
    if command.training is not None:
        return int(load(TRAINING)(command.name, argv))
    if command.act:
        return int(load(ACTING)(command.name, argv))
    return int(load(command.run)(list(argv)))


# settings are resolved in the library, which knows its own commands alone; looked up anew, since the list may grow
add_program(lambda: commands())
