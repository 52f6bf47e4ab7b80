"""Settings merged from all sources: defaults, then files, then what is given by name; the later wins.

All problems of all sources are reported together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.config import errors, yaml_file
from rft.config.commands import configured, load
from rft.config.errors import SettingsError
from rft.config.origins import DEFAULT, GivenSetting
from rft.config.refused_flags import refusal_of
from rft.config.render import config_yaml
from rft.config.rules import contradictions
from rft.config.schema import REQUIRED, Setting, build, schema
from rft.config.trained_model import newest_model
from rft.config.values import NotAllowed, convert
from rft.resolved import Origin, Resolved
from rft_core.errors import Problem
from rft_core.secrets import looks_like_key

_MODEL = "pretrain"
"""The setting that takes a run in the place of a model."""
_TRACKERS = ("use_wandb", "use_tensorboard", "use_trackio")


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A file of settings that was found."""

    path: Path
    name: str
    """The name of runs that are made from it."""
    is_recipe: bool = False


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

    def add_file(self, source: SettingsFile) -> None:
        """Take the settings of a file over those that are there."""
        file = yaml_file.read(source.path, self.schema, kind="recipe" if source.is_recipe else "file")
        name = file.header.get("name", source.name)  # a run's config.yaml names the recipe that it was made from
        # runs are named after it, so it must not lead into another directory
        self.recipe_name = name if Path(name).name == name else source.name
        self.sources.append(source.path)
        self.problems += file.problems
        made_for = file.header.get("command", self.command)
        # one problem in place of one for every setting that only the other command has
        if made_for != self.command:
            self.problems.append(_other_command(self.command, source, made_for))
            return
        for option in file.options:
            self.add(option)

    def add(self, option: GivenSetting) -> None:
        """Take a setting over what is there; what cannot be taken becomes a problem."""
        setting = self.schema.get(option.name)
        if setting is None:
            refusal = refusal_of(option.name, option.texts)
            if refusal:
                self.problems.append(errors.refused_option(option, refusal, self.command))
            else:
                self.problems.append(errors.unknown_option(self.command, option))
            return
        if option.name in _TRACKERS and any(looks_like_key(text) for text in option.texts):
            self.problems.append(errors.key_as_project(option))
        elif option.is_null and not setting.may_be_none:
            self.problems.append(errors.bad_value(setting, option))
        else:
            try:
                value = convert(setting, option.texts)
                self.values[option.name] = newest_model(value) if option.name == _MODEL else value
                self.origins[option.name] = option.origin
            except NotAllowed:
                self.problems.append(errors.bad_value(setting, option))


def defaults(command: str) -> MergedSources:
    """Return the settings of a command before any source is read."""
    table = schema(command)
    return MergedSources(
        command, table, {name: row.default for name, row in table.items()}, dict.fromkeys(table, DEFAULT)
    )


def validated(merged: MergedSources) -> Resolved[Any]:
    """Return the settings merged from all sources.

    Raises:
        SettingsError: with every problem of all sources.
    """
    command = merged.command
    remedies = " ".join(problem.do for problem in merged.problems)
    # one that was given under another name is answered there already
    missing = [row for row in merged.missing if not re.search(rf"(?:--|\b){row.name}(?: |=|: )", remedies)]
    problems = merged.problems + [errors.missing_setting(command, setting) for setting in missing]
    # a contradiction is checked between values that are all legal by themselves
    if not problems:
        problems = contradictions.contradictions(command, merged.values, merged.origins)
    if problems:
        raise SettingsError(problems=problems)
    return Resolved(
        command=command,
        config_yaml=config_yaml(command, merged.values, merged.origins, merged.recipe_name),
        settings=build(load(configured(command).settings), merged.values),
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


def _other_command(command: str, source: SettingsFile, made_for: str) -> Problem:
    reference = source.name if source.is_recipe else str(source.path)
    return errors.unreadable(
        "file.other_command",
        f"{reference} is made for rft-train {made_for}, not for rft-train {command}",
        Origin("file", str(source.path)),
        "the commands have different settings",
        f"rft-train {made_for} --config {reference}",
    )
