"""One settings object from defaults, files and flags, in this order; the later wins.

All problems of all sources are reported together. No torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rft.config.commands import installed_spellings, load
from rft.config.errors import given_twice
from rft.config.merged_sources import MergedSources, defaults, validated
from rft.config.names import CONFIG
from rft.config.origins import GivenSetting
from rft.resolved import Origin, Resolved
from rft_cli.config import command_line, recipes, word_problems
from rft_cli.records.discovery import commands

_PLACED = ("RANK", "SLURM_PROCID")
"""Variables of a rank that a launcher has placed."""
_PLACED_HERE = "RFT_NPROC"
"""Variable of a rank that this program has placed itself (`rft_dist.launch.environment.SPAWNED`)."""


def resolve(command: str, argv: Sequence[str]) -> Resolved[Any]:
    """The settings of `rft-train COMMAND ARGV...`.

    Raises:
        SettingsError: with every problem of the command line and of the files.
    """
    return validated(merge(command, argv))


def merge(command: str, argv: Sequence[str], keywords: Sequence[GivenSetting] = ()) -> MergedSources:
    """Defaults, then files, environment, flags and the keyword arguments of Python code; nothing is raised."""
    merged = defaults(command)
    record = commands().get(command)
    merged.spellings = load(record.spellings)() if record and record.spellings else installed_spellings(command)
    table = merged.names
    words = command_line.read(argv, table)
    for reference in words.configs:
        source, problem = recipes.find(reference)
        merged.problems += [problem] if problem else []
        if source is not None:
            merged.add_file(source)
    for option in (*_of_environment(merged, os.environ), *words.options, *keywords):
        merged.add(option)
    merged.problems += [given_twice(*pair) for pair in command_line.two_forms(words.options, table)]
    for option in words.without_value:
        if option.name == CONFIG:
            merged.problems.append(word_problems.config_without_name(option))
        else:
            merged.problems.append(word_problems.missing_value(table[option.name], option))
    merged.problems += [word_problems.negated_with_value(option) for option in words.negated_with_value]
    merged.problems += [word_problems.unexpected_argument(text, recipes.names(), command) for text in words.strays]
    return merged


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a rank that was placed already."""
    return any(environment.get(name) for name in _PLACED)


def _of_environment(merged: MergedSources, environment: Mapping[str, str]) -> list[GivenSetting]:
    """Settings that variables of the environment give; where a launcher placed the ranks, they are its own."""
    if merged.spellings is None or (is_launched(environment) and not environment.get(_PLACED_HERE)):
        return []
    return [
        GivenSetting(variable, name, (environment[variable],), Origin("environment", file=variable))
        for variable, name in merged.spellings.environment.items()
        if environment.get(variable)
    ]
