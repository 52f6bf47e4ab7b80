"""`rft-train recipes run NAME`: the stages of a recipe one after another, each an ordinary command.

Every command is printed before it runs, so that a person can run it by hand. Run again on the same
directory, finished stages are passed over and an interrupted one is continued.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rft.config.option_problems import not_a_value
from rft_cli.commands.arguments import Arguments
from rft_cli.config.recipe_stages import RecipeStage, option
from rft_cli.config.recipes import Recipe
from rft_cli.config.resolve import resolve
from rft_cli.records.discovery import commands, default_command, find_command, run_command
from rft_core.checkpoint_places import step_directories
from rft_core.errors import CheckpointError, DataError, OptionsError
from rft_trainer.runs.reader import as_object

DATA_VARIABLE = "RFT_DATA_DIR"
RECORD = "stages.json"


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Choices of a person for one run of a recipe; kept in stages.json so that a later call repeats them."""

    recipe: str
    data: str
    seed: str
    quick: bool


def run(recipe: Recipe, arguments: Arguments) -> int:
    """Run every stage that is not finished; the exit code of the first that fails is the program's."""
    if not recipe.stages:
        raise OptionsError(
            code="recipe.no_stages",
            what=f"{recipe.name} is one command and has no stages",
            where="command line",
            why="`recipes run` runs the stages that a recipe lists",
            # a recipe of a command's name is its configuration, which the command fills in
            do=f"rft-train {recipe.name}"
            if recipe.name in commands()
            else f"rft-train {recipe.command or default_command()} --config {recipe.name}",
        )
    _refuse_ranks(recipe)
    path = _directory(recipe, arguments)
    choices = _choices(recipe, arguments, path)
    values = {**{key: str(value) for key, value in asdict(choices).items()}, "run": str(path)}
    for stage in recipe.stages:
        words = stage.words(values, quick=choices.quick)
        resolve(
            stage.command, words[1:]
        )  # settings that cannot be used are refused before the first stage spends its time
    path.mkdir(parents=True, exist_ok=True)
    # before the first stage: a later call repeats these choices
    (path / RECORD).write_text(json.dumps(asdict(choices), indent=2) + "\n")
    (path / "recipe.yaml").write_text(recipe.path.read_text(encoding="utf-8"), encoding="utf-8")
    started = time.monotonic()
    for number, stage in enumerate(recipe.stages, start=1):
        title = f"stage {number} of {len(recipe.stages)}, {stage.name}"
        _run_stage(title, stage, stage.words(values, quick=choices.quick))
    print(f"\n{recipe.name}: all {len(recipe.stages)} stages are finished, {_minutes(started)} in this call; {path}")
    return 0


def _run_stage(title: str, stage: RecipeStage, words: list[str]) -> None:
    target = Path(option(words, "output") or option(words, "save_path"))
    if _is_finished(stage, target):
        print(f"{title}: finished already ({target})")
        return
    # an interrupted stage goes on from its checkpoint; without one it starts again
    resumed = (
        find_command(stage.command).stage_result == "run"
        and (target / "config.yaml").is_file()
        and _set_aside_unsaved(target)
    )
    words = ["resume", str(target)] if resumed else words
    print(f"\n{title}:\n  {shlex.join(['rft-train', *words])}\n", flush=True)
    started = time.monotonic()
    try:
        code = run_command(find_command(words[0]), words[1:])
    except CheckpointError as error:
        if error.problem.code != "run.finished":  # stopped by a signal just after its last step
            raise
        code = 0
    assert code == 0, f"{title} returned {code} without an error"
    print(f"\n{title}: finished, {_minutes(started)}", flush=True)


def _is_finished(stage: RecipeStage, target: Path) -> bool:
    """Return True for a run whose summary says so; for an output, a model or a tokenizer, when its file exists."""
    result = find_command(stage.command).stage_result
    if result == "run":
        return _json(target / "summary.json").get("outcome") == "finished"
    if result == "output":
        return target.is_file()
    return (target / ("config.json" if result == "model" else "tokenizer.json")).is_file()


def _set_aside_unsaved(target: Path) -> bool:
    """Return True when there is a checkpoint to continue from; else move the run aside, so that it starts again."""
    if any((saved / "manifest.json").is_file() for saved in step_directories(target / "checkpoints")):
        return True
    number = 1
    while (aside := target.with_name(f"{target.name}-unsaved-{number}")).exists():
        number += 1
    target.rename(aside)
    print(f"{target} ended before its first checkpoint: moved to {aside}, and started again")
    return False


def _refuse_ranks(recipe: Recipe) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionsError(
            code="recipe.ranks",
            what=f"recipes run was started as {os.environ['WORLD_SIZE']} processes",
            where="WORLD_SIZE",
            why="it runs its stages in this one process; a stage runs on several by its own command",
            do=f"rft-train recipes run {recipe.name}",
        )


def _directory(recipe: Recipe, arguments: Arguments) -> Path:
    """Return the run's directory, absolute, so that the printed commands work from anywhere."""
    if arguments.values.get("save_path"):
        return Path(arguments.values["save_path"]).expanduser().resolve()
    from rft_trainer.runs.names import run_name

    return (Path("runs") / run_name(recipe.name, under=Path("runs"))).resolve()


def _choices(recipe: Recipe, arguments: Arguments, path: Path) -> StageOptions:
    """Return the choices of this call, completed by those of an earlier call on the same directory."""
    stored = _json(path / RECORD)
    # an empty directory may have been made for this run
    if path.exists() and not stored and any(path.iterdir()):
        raise OptionsError(
            code="recipe.not_its_directory",
            what=f"{path} holds files and is not the run of a recipe",
            where="--save_path",
            why="a recipe's stages are kept in a directory of their own",
            do=f"--save_path {path / recipe.name}",
        )
    seed = arguments.values.get("seed", str(stored.get("seed", "42")))
    if not seed.isdecimal():
        what = f"--seed {seed} is not a whole number of at least 0"
        raise OptionsError.of(not_a_value(what, "the same seed gives the same run", "--seed 42"))
    # a later call may come from another directory
    reference = recipe.name if recipe.is_installed else str(recipe.path.resolve())
    choices = StageOptions(
        recipe=str(stored.get("recipe", reference)),
        data=_data_directory(recipe, arguments.values.get("data") or stored.get("data")),
        seed=seed,
        quick="quick" in arguments.switches or stored.get("quick") is True,
    )
    asked = {"recipe": reference, "data": choices.data, "seed": seed, "quick": choices.quick}
    changed = [name for name, value in stored.items() if asked.get(name) != value]
    if changed:
        name = changed[0]
        raise OptionsError(
            code="recipe.other_choices",
            what=f"{path} was started with {name} = {stored[name]}, now {name} = {asked.get(name)}",
            where="command line",
            why="finished stages would not be those of the new choice",
            state="the earlier stages are untouched; nothing was started",
            do=f"--save_path {path}-2",
        )
    return choices


def _data_directory(recipe: Recipe, data: str | None) -> str:
    """The directory of the data sets, absolute, with every file that the recipe needs."""
    if not recipe.needs:
        return str(Path(data or os.environ.get(DATA_VARIABLE, ".")).expanduser().resolve())
    chosen = data or os.environ.get(DATA_VARIABLE, "")
    files = ", ".join(recipe.needs)
    if not chosen:
        raise DataError(
            code="recipe.no_data",
            what=f"the data directory is not given: {recipe.name} needs {files}",
            where=f"--data, or the environment variable {DATA_VARIABLE}",
            why="data are read where they are; nothing is downloaded",
            do=f"rft-train recipes run {recipe.name} --data DIR (the directory that holds {recipe.needs[0]})",
        )
    directory = Path(chosen).expanduser().resolve()
    missing = [name for name in recipe.needs if not (directory / name).is_file()]
    if missing:
        # the directory above may be the one that was meant
        is_one_above = all((directory.parent / name).is_file() for name in recipe.needs)
        raise DataError(
            code="recipe.missing_data",
            what=f"{directory} has no {', '.join(missing)}; {recipe.name} needs {files}",
            where="--data" if data else DATA_VARIABLE,
            why="data are read where they are; nothing is downloaded",
            do=f"--data {directory.parent}" if is_one_above else f"--data DIR (the one that holds {missing[0]})",
        )
    return str(directory)


def _json(file: Path) -> dict[str, Any]:
    try:
        return as_object(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _minutes(started: float) -> str:
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    return f"{minutes} min {seconds:02d} s"
