"""One settings object from defaults, files and flags, in this order; the later wins.

All problems of all sources are reported together. No torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.resolved import Origin, Resolved
from rft_cli.config import command_line, errors, recipes, yaml_file
from rft_cli.config.errors import SettingsError
from rft_cli.config.origins import DEFAULT, GivenSetting
from rft_cli.config.refused_flags import refusal_of
from rft_cli.config.render import config_yaml
from rft_cli.config.rules import contradictions
from rft_cli.config.schema import REQUIRED, Setting, build, schema
from rft_cli.config.stored_run import newest_model
from rft_cli.config.values import NotAllowed, convert
from rft_cli.records.discovery import find_command, load
from rft_core.errors import Problem
from rft_core.secrets import looks_like_key

_MODEL = "pretrain"
"""The setting that takes a run in the place of a model."""
_TRACKERS = ("use_wandb", "use_tensorboard", "use_trackio")


@dataclass(slots=True)
class MergedSources:
    """Values merged from all sources, with the problems found in them."""

    command: str
    schema: dict[str, Setting]
    values: dict[str, Any]
    origins: dict[str, Origin]
    recipe_name: str = ""
    sources: list[Path] = field(default_factory=list[Path])
    problems: list[Problem] = field(default_factory=list[Problem])

    @property
    def missing(self) -> list[Setting]:
        """Settings without a default that no source gives."""
        return [self.schema[name] for name, value in self.values.items() if value is REQUIRED]


def resolve(command: str, argv: Sequence[str]) -> Resolved[Any]:
    """The settings of `rft-train COMMAND ARGV...`.

    Raises:
        SettingsError: with every problem of the command line and of the files.
    """
    return validated(merge(command, argv))


def validated(merged: MergedSources) -> Resolved[Any]:
    """Return the settings merged from all sources.

    Raises:
        SettingsError: with every problem of all sources.
    """
    command = merged.command
    problems = merged.problems + [errors.missing_setting(command, setting) for setting in merged.missing]
    # a contradiction is checked between values that are all legal by themselves
    if not problems:
        problems = contradictions.contradictions(command, merged.values, merged.origins)
    if problems:
        raise SettingsError(problems=problems)
    return Resolved(
        command=command,
        config_yaml=config_yaml(command, merged.values, merged.origins, merged.recipe_name),
        settings=build(load(find_command(command).settings), merged.values),
        values=merged.values,
        origins=merged.origins,
        recipe_name=merged.recipe_name,
        sources=tuple(merged.sources),
        notes=tuple(
            contradictions.notes(
                command, merged.values, merged.origins, {name: row.default for name, row in merged.schema.items()}
            )
        ),
    )


def merge(command: str, argv: Sequence[str], keywords: Sequence[GivenSetting] = ()) -> MergedSources:
    """Defaults, then files, then flags, then the keyword arguments of Python code; nothing is raised."""
    table = schema(command)
    merged = MergedSources(
        command, table, {name: row.default for name, row in table.items()}, dict.fromkeys(table, DEFAULT)
    )
    words = command_line.read(argv, table)
    for reference in words.configs:
        _read_config(merged, reference)
    for option in (*words.options, *keywords):
        _apply(merged, option)
    merged.problems += [errors.given_twice(*pair) for pair in command_line.two_forms(words.options, table)]
    for option in words.without_value:
        if option.name == command_line.CONFIG:
            merged.problems.append(errors.config_without_name(option))
        else:
            merged.problems.append(errors.missing_value(table[option.name], option))
    merged.problems += [errors.negated_with_value(option) for option in words.negated_with_value]
    merged.problems += [errors.unexpected_argument(text, recipes.names(), command) for text in words.strays]
    return merged


def _read_config(merged: MergedSources, reference: str) -> None:
    source, problem = recipes.find(reference)
    if source is None:
        merged.problems += [problem] if problem else []
        return
    file = yaml_file.read(source.path, merged.schema, kind="recipe" if source.is_recipe else "file")
    name = file.header.get("name", "")  # of the recipe that a run's config.yaml was made from
    # runs are named after it, so it must not lead into another directory
    merged.recipe_name = name if name and Path(name).name == name else source.name
    merged.sources.append(source.path)
    merged.problems += file.problems
    made_for = file.header.get("command", merged.command)
    # one problem in place of one for every setting that only the other command has
    if made_for != merged.command:
        merged.problems.append(_other_command(merged, reference, made_for, source.path))
        return
    for option in file.options:
        _apply(merged, option)


def _apply(merged: MergedSources, option: GivenSetting) -> None:
    setting = merged.schema.get(option.name)
    if setting is None:
        refusal = refusal_of(option.name, option.texts)
        if refusal:
            merged.problems.append(errors.refused_option(option, refusal, merged.command))
        else:
            merged.problems.append(errors.unknown_option(merged.command, option))
        return
    if option.name in _TRACKERS and any(looks_like_key(text) for text in option.texts):
        merged.problems.append(errors.key_as_project(option))
    elif option.is_null and not setting.may_be_none:
        merged.problems.append(errors.bad_value(setting, option))
    else:
        try:
            value = convert(setting, option.texts)
            merged.values[option.name] = newest_model(value) if option.name == _MODEL else value
            merged.origins[option.name] = option.origin
        except NotAllowed:
            merged.problems.append(errors.bad_value(setting, option))


def _other_command(merged: MergedSources, reference: str, made_for: str, path: Path) -> Problem:
    return errors.unreadable(
        "file.other_command",
        f"{reference} is made for rft-train {made_for}, not for rft-train {merged.command}",
        Origin("file", str(path)),
        "the commands have different settings",
        f"rft-train {made_for} --config {reference}",
    )
