"""Settings merged from all sources: defaults, then files, then what is given by name; the later wins.

All problems of all sources are reported together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.config import errors, yaml_file
from rft.config.commands import configured, load, typed
from rft.config.errors import SettingsError
from rft.config.origins import DEFAULT, GivenSetting
from rft.config.refused_flags import refusal_of
from rft.config.render import config_yaml
from rft.config.rules import contradictions
from rft.config.rules.sourced_values import SourcedValues
from rft.config.schema import REQUIRED, Setting, build, schema
from rft.config.spellings import Derivation, Spellings
from rft.config.trained_model import model_in_place_of_run
from rft.config.values import NotAllowed, convert
from rft.resolved import Origin, Resolved
from rft_core.errors import Problem
from rft_core.secrets import looks_like_key

_TRACKERS = ("use_wandb", "use_tensorboard", "use_trackio", "use_mlflow")


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
    spellings: Spellings | None = None
    """Names of another program that are taken beside the command's own."""
    notes: list[str] = field(default_factory=list[str])
    derivations: list[Derivation] = field(default_factory=list[Derivation])
    given: dict[str, GivenSetting] = field(default_factory=dict[str, GivenSetting])
    """The last form in which each setting was given."""
    foreign: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the other program that were given, by its names."""

    @property
    def names(self) -> dict[str, Setting]:
        """Every setting that a source may name: the command's own, and those of the other program."""
        return {**(self.spellings.table if self.spellings else {}), **self.schema}

    @property
    def proposed(self) -> dict[str, Setting]:
        """Every setting that a message may propose."""
        return {**(self.spellings.proposed if self.spellings else {}), **self.schema}

    @property
    def missing(self) -> list[Setting]:
        """Settings without a default that no source gives."""
        return [self.schema[name] for name, value in self.values.items() if value is REQUIRED]

    def add_file(self, source: SettingsFile) -> None:
        """Take the settings of a file over those that are there."""
        file = yaml_file.read(source.path, self.names, kind="recipe" if source.is_recipe else "file")
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
        option = self.spellings.in_own_words(option) if self.spellings else option
        if setting is None and self.spellings and option.name in self.spellings.table:
            self._translate(option, self.spellings)
        elif setting is None:
            refusal = refusal_of(option.name, option.texts)
            if refusal:
                self.problems.append(errors.refused_option(option, refusal, self.command))
            else:
                self.problems.append(errors.unknown_option(self.command, option, self.proposed))
        elif option.name in _TRACKERS and any(looks_like_key(text) for text in option.texts):
            self.problems.append(errors.key_as_project(option))
        elif option.is_null and not setting.may_be_none:
            self.problems.append(errors.bad_value(setting, option))
        else:
            try:
                value = convert(setting, option.texts)
                self._refuse_second_form(option)
                self.values[option.name] = model_in_place_of_run(option.name, value)
                self.origins[option.name] = option.origin
                self.given[option.name] = option
            except NotAllowed:
                self.problems.append(errors.bad_value(setting, option))

    def _translate(self, option: GivenSetting, spellings: Spellings) -> None:
        """Take a setting of the other program as what it means here."""
        row = spellings.table[option.name]
        if option.is_null and not row.may_be_none:
            self.problems.append(errors.bad_value(row, option))
            return
        try:
            value = convert(row, option.texts)
        except NotAllowed:
            self.problems.append(errors.bad_value(row, option))
            return
        self.foreign[row.full_names[1]] = value
        meant = spellings.translate(option, value)
        self.notes += meant.notes
        self.problems += meant.problems
        self.derivations += [meant.later] if meant.later else []
        for own in meant.options:
            self.add(own)

    def _refuse_second_form(self, option: GivenSetting) -> None:
        """Refuse two values of one source for a setting, one of them under a name of the other program."""
        first = self.given.get(option.name)
        if self.spellings is None or first is None or first.texts == option.texts:
            return
        is_one_source = (first.origin.kind, first.origin.file) == (option.origin.kind, option.origin.file)
        forms = {re.sub(r"[-.]", "_", form.written.lstrip("-")).removeprefix("no_") for form in (first, option)}
        if is_one_source and len(forms) == 2 and any(form in self.spellings.table for form in forms):
            self.problems.append(errors.given_twice(first, option))


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
    # what follows from others, and contradictions, are looked for between values that are all legal by themselves
    if not problems:
        problems = _derive(merged)
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
        notes=(
            *dict.fromkeys(merged.notes),
            *contradictions.notes(
                command, merged.values, merged.origins, {name: row.default for name, row in merged.schema.items()}
            ),
        ),
    )


def _derive(merged: MergedSources) -> list[Problem]:
    """Set what follows from what is given, and return what stands against it."""
    problems: list[Problem] = []
    own = configured(merged.command).derive
    for derivation in [*merged.derivations, *([load(own)] if own else [])]:
        derived = derivation(SourcedValues(merged.values, merged.origins))
        merged.values |= derived.values
        merged.origins |= dict.fromkeys(derived.values, derived.origin)
        merged.notes += derived.notes
        problems += derived.problems
    return problems


def _other_command(command: str, source: SettingsFile, made_for: str) -> Problem:
    reference = source.name if source.is_recipe else str(source.path)
    return errors.unreadable(
        "file.other_command",
        f"{reference} is made for rft-train {typed(made_for)}, not for rft-train {typed(command)}",
        Origin("file", str(source.path)),
        "the commands have different settings",
        f"rft-train {typed(made_for)} --config {reference}",
    )
