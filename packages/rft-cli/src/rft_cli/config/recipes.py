"""Recipes: their names, their headers, and the file that a `--config` selects.

A recipe is a file of settings in `rft_cli/recipes`. Its header tells a person whether to run it::

    recipe:
      command: rl
      task: addition of two-digit numbers
      hardware: 2 CPU cores
      minutes: 2
      expected: accuracy 0.05 -> 0.90 on 200 held-out problems
      date: 2026-11-20
    pretrain: ...

It states only what differs from the defaults. One for machines that it was not run on says so, and what machines they
are, which `rft-train plan` then plans for (`gpu_memory` in GiB, as a card has it and not as it is sold)::

      hardware: one node of 8 cards of 80 GB
      nodes: 1
      gpus_per_node: 8
      gpu_memory: 79
      status: not yet run on its hardware
      memory: 58 of 79 GiB

A recipe of several stages lists their command lines
(`config.recipe_stages` says how they are read) and the files that they need below the data directory::

      needs: gsm8k/train.jsonl, gsm8k/test.jsonl
      stages:
        - name: sft
          run: sft --config my-sft --prompt_data {data}/gsm8k/train.jsonl --save_path {run}/sft --seed {seed}
          quick: --max_steps 5
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rft.config import yaml_file
from rft.config.merged_sources import SettingsFile
from rft.resolved import Origin
from rft_cli.config.recipe_stages import RecipeStage, option, read_stage
from rft_core.durable_files import kind_of
from rft_core.errors import Problem
from rft_core.nearest_names import nearest_names

DIRECTORY = Path(__file__).parents[1] / "recipes"
SUFFIXES = (".yaml", ".yml")
HEADER_FIELDS = ("command", "task", "hardware", "minutes", "expected", "date", "status", "memory")
MACHINE_FIELDS = ("nodes", "gpus_per_node", "gpu_memory")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Header of a recipe; a field is empty where the header lacks it."""

    name: str
    path: Path
    command: str
    task: str
    hardware: str
    minutes: str
    expected: str
    date: str
    status: str = ""
    """What keeps its numbers from being measured ones; empty for a recipe that was run."""
    memory: str = ""
    """Of a GPU, as the plan computes it."""
    machine: Mapping[str, int] = field(default_factory=dict[str, int])
    """Those of `MACHINE_FIELDS` that it gives."""
    needs: tuple[str, ...] = ()
    """Files below the data directory that the stages read."""
    stages: tuple[RecipeStage, ...] = ()

    @property
    def is_installed(self) -> bool:
        """True when `--config NAME` finds the recipe from any directory."""
        return self.path.is_relative_to(DIRECTORY)


def names(directory: Path | None = None) -> list[str]:
    """The names of all recipes, sorted."""
    return sorted(_files(directory))


def load(name: str, directory: Path | None = None) -> Recipe:
    """The header of one recipe."""
    return read(_files(directory)[name])


def _files(directory: Path | None = None) -> dict[str, Path]:
    """Return the files of recipes by name; a name is one of its own whatever folder it is in."""
    return {path.stem: path for path in (directory or DIRECTORY).glob("**/*.yaml")}


def read(path: Path) -> Recipe:
    """The header of the recipe in a file."""
    file = yaml_file.read(path, {})
    header = file.header
    return Recipe(
        path.stem,
        path,
        *(header.get(name, "") for name in HEADER_FIELDS),
        machine={name: int(header[name]) for name in MACHINE_FIELDS if header.get(name, "").isdecimal()},
        needs=tuple(part.strip() for part in header.get("needs", "").split(",") if part.strip()),
        stages=tuple(read_stage(fields, path) for fields in file.stages),
    )


def find(reference: str) -> tuple[SettingsFile | None, Problem | None]:
    """The file that a `--config` means: a file, a run's directory, or a recipe's name."""
    path = Path(reference).expanduser()
    # what is on the disk wins over a recipe of the same name
    if path.is_file():
        return SettingsFile(path, path.stem), None
    if path.is_dir() and (path / "config.yaml").is_file():
        return SettingsFile(path / "config.yaml", path.resolve().name), None
    if reference in names():
        return SettingsFile(_files()[reference], reference, is_recipe=True), None
    return None, _not_found(reference, path)


def with_command(words: Sequence[str], known: Collection[str]) -> list[str]:
    """Return `COMMAND --config NAME ...` for `NAME ...`; the words as they are where the first is no recipe.

    The two words of a command such as `genrec sft` become the one that joins them.

    Args:
        words: of a command line whose first one may be a command.
        known: the commands; a recipe or file of such a name is meant with --config alone.
    """
    first = words[0] if words else ""
    if (joined := "-".join(words[:2])) in known and first not in known:
        return [joined, *words[2:]]
    if not first or first.startswith("-") or first in known:
        return list(words)
    source, _ = find(first)
    command = read(source.path).command if source is not None else ""
    return [command, "--config", *words] if command else list(words)


def machine_of(words: Sequence[str]) -> tuple[Mapping[str, int], str]:
    """Return the machine of the recipe or file that `--config` names among the words, and its name."""
    reference = option(list(words), "config")
    source = find(reference)[0] if reference else None
    return (read(source.path).machine, source.name) if source is not None else ({}, "")


def _not_found(reference: str, path: Path) -> Problem:
    looks_like_file = path.suffix in SUFFIXES or len(path.parts) > 1
    beside = path.parent.glob("*") if path.parent.is_dir() else ()
    siblings = sorted(str(sibling) for sibling in beside if sibling.suffix in SUFFIXES and sibling.is_file())
    near = nearest_names(reference, siblings if looks_like_file else [*names(), *siblings])
    listed = near or names()
    kind = "file" if looks_like_file else "file, run or recipe"
    return Problem(
        code="file.not_found",
        what=f"no {kind} is called {reference}"
        if not path.exists()
        else f"{reference} is {kind_of(path)}, and no {kind}",
        where=str(Origin("command line")),
        why=f"nearest: {', '.join(near)}" if near else f"recipes: {', '.join(listed) or 'none'}",
        do=f"--config {near[0]}" if near else "rft-train recipes",
    )
