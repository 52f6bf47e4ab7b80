"""The stages of a recipe: command lines with placeholders for data, run, seed and earlier stages.

A stage has a `name`, a command line `run` without the word rft-train, and `quick`: flags that are added
for a short trial of the whole. In both, these stand for values:

    {data}         the directory of the data sets
    {run}          the directory of this run of the recipe; a stage keeps its own below it
    {seed}         start of every random draw
    {recipe}       the recipe itself, for --config
    {final:NAME}   the model of the newest checkpoint in {run}/NAME

Other braces stand for themselves. Words are divided as a shell does it, before values are put in, so
that a path with spaces is one word.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rft_cli.records.discovery import commands
from rft_core.checkpoint_places import step_directories
from rft_core.errors import DataError

_PLACE = re.compile(r"\{(data|run|seed|recipe|final:([\w.-]+))\}")


@dataclass(frozen=True, slots=True)
class RecipeStage:
    """One command of a recipe, its places not yet filled."""

    name: str
    run: tuple[str, ...]
    """The command and its words."""
    quick: tuple[str, ...]
    """Words added for a short trial."""

    @property
    def command(self) -> str:
        """The verb of the command line."""
        return self.run[0]

    def words(self, values: Mapping[str, str], *, quick: bool) -> list[str]:
        """The command line with `values` in the places; a model of an earlier stage is looked up in {run}."""
        line = (*self.run, *self.quick) if quick else self.run
        return [_PLACE.sub(lambda match: _value(match, values), word) for word in line]


def stage_commands() -> list[str]:
    """Return what a stage can run: commands whose work is found again in one place."""
    return [command.name for command in commands().values() if command.stage_result]


def read_stage(fields: Mapping[str, str], path: Path) -> RecipeStage:
    """A stage from the header's text.

    Raises:
        DataError: a field is missing or unknown, or the command is none that a stage can run.
    """
    name, run = fields.get("name", ""), _split(fields.get("run", ""), path)
    unknown = sorted(set(fields) - {"name", "run", "quick"})
    if not name or not run or run[0] not in stage_commands() or unknown:
        raise DataError(
            code="recipe.stage",
            what=f"stage {name or '(without a name)'}: "
            + (f"unknown field {unknown[0]}" if unknown else f"run = {fields.get('run', '')!r}"),
            where=str(path),
            why=f"a stage has a name, a command line `run` of {', '.join(stage_commands())}, and flags `quick`",
            do="rft-train recipes show gsm8k-tiny",
        )
    return RecipeStage(name, run, _split(fields.get("quick", ""), path))


def option(words: list[str], name: str) -> str:
    """The value of `--name` in a filled command line, the last one given; empty where it is not given."""
    value = ""
    for index, word in enumerate(words):
        written, equals, inline = word.partition("=")
        if written.lstrip("-").replace("-", "_") == name and written.startswith("-"):
            value = inline if equals else words[index + 1] if index + 1 < len(words) else ""
    return value


def final_model(directory: Path) -> Path:
    """The model of the newest checkpoint of a run, or a model directory itself.

    A stage that has not run yet leaves the checkpoint's step open: `step_*`.
    """
    if (directory / "config.json").is_file():
        return directory
    models = [model for saved in step_directories(directory / "checkpoints") if (model := saved / "model").is_dir()]
    return models[-1] if models else directory / "checkpoints" / "step_*" / "model"


def _split(text: str, path: Path) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise DataError(
            code="recipe.quotes",
            what=f"the command line {text!r} cannot be divided into words: {error}",
            where=str(path),
            why="words are divided as a shell does it",
            do="close the quotation mark",
        ) from error


def _value(match: re.Match[str], values: Mapping[str, str]) -> str:
    if match[2]:
        return str(final_model(Path(values["run"]) / match[2]))
    return values[match[1]]
