"""One settings object from defaults, files and flags, in this order; the later wins.

All problems of all sources are reported together. No torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rft.config.merged_sources import MergedSources, defaults, validated
from rft.config.names import CONFIG
from rft.config.origins import GivenSetting
from rft.resolved import Resolved
from rft_cli.config import command_line, recipes, word_problems


def resolve(command: str, argv: Sequence[str]) -> Resolved[Any]:
    """The settings of `rft-train COMMAND ARGV...`.

    Raises:
        SettingsError: with every problem of the command line and of the files.
    """
    return validated(merge(command, argv))


def merge(command: str, argv: Sequence[str], keywords: Sequence[GivenSetting] = ()) -> MergedSources:
    """Defaults, then files, then flags, then the keyword arguments of Python code; nothing is raised."""
    merged = defaults(command)
    table = merged.schema
    words = command_line.read(argv, table)
    for reference in words.configs:
        source, problem = recipes.find(reference)
        merged.problems += [problem] if problem else []
        if source is not None:
            merged.add_file(source)
    for option in (*words.options, *keywords):
        merged.add(option)
    merged.problems += [word_problems.given_twice(*pair) for pair in command_line.two_forms(words.options, table)]
    for option in words.without_value:
        if option.name == CONFIG:
            merged.problems.append(word_problems.config_without_name(option))
        else:
            merged.problems.append(word_problems.missing_value(table[option.name], option))
    merged.problems += [word_problems.negated_with_value(option) for option in words.negated_with_value]
    merged.problems += [word_problems.unexpected_argument(text, recipes.names(), command) for text in words.strays]
    return merged
