"""`rft-train recipes`, `recipes show NAME [--resolved]`, `recipes copy NAME [FILE]`, `recipes run NAME`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from rft.config.commands import typed
from rft.config.errors import SettingsError
from rft.config.option_problems import stray_word
from rft.config.render import config_yaml
from rft.hub.hub_names import DATA_SETTINGS, dataset_name, model_name
from rft_cli.commands import arguments
from rft_cli.config import recipes
from rft_cli.config.recipes import Recipe
from rft_cli.config.resolve import merge
from rft_cli.records.discovery import default_command, with_settings
from rft_core.errors import DataError, OptionsError
from rft_core.nearest_names import nearest_names
from rft_core.terminal_text import visible

USAGE = """usage: rft-train recipes                                  list the recipes
       rft-train recipes show NAME                        the file as it is
       rft-train recipes show NAME --resolved [--flag V]  every setting with its origin
       rft-train recipes copy NAME [FILE]                 copy it (default: NAME.yaml here), to change it
       rft-train recipes run NAME [OPTIONS]               run all stages of a recipe that has several

A recipe of one command is run with: rft-train COMMAND --config NAME

Options of run (NAME may be a file):
  --data DIR         directory of the data sets (default: the environment variable RFT_DATA_DIR)
  --save_path DIR    directory of the run (default runs/<recipe>-<date>-<word>); given again, finished
                     stages are passed over and an interrupted one is continued
  --seed N           start of every random draw (default 42)
  --quick            a trial of a minute or two: every stage, cut short"""

_NOT_RUN = "Not yet run on their hardware; resolved by rft-train plan NAME, which shows where the memory goes:"
VERBS = ("list", "show", "copy", "run")


def run(argv: list[str]) -> int:
    """List, show or copy."""
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    verb, rest = (argv[0], argv[1:]) if argv else ("list", [])
    if verb == "show":
        parsed = arguments.parse("recipes show", rest, most=1, switches=["resolved"], keep_flags=True)
        _show(_recipe(parsed.word(0)), resolved="resolved" in parsed.switches, flags=parsed.rest)
    elif verb == "copy":
        parsed = arguments.parse("recipes copy", rest, most=2)
        recipe = _recipe(parsed.word(0))
        _copy(recipe, Path(parsed.word(1, f"{recipe.name}.yaml")))
    elif verb == "run":
        from rft_cli.commands import recipes_run

        parsed = arguments.parse("recipes run", rest, most=1, switches=["quick"], options=["data", "save_path", "seed"])
        return recipes_run.run(_recipe_or_file(parsed.word(0)), parsed)
    elif verb == "list":
        arguments.parse("recipes", rest, most=0)
        _list()
    else:
        near = nearest_names(verb, VERBS) or list(VERBS)
        what, why = f"unknown: recipes {verb}", f"it takes {', '.join(VERBS)}"
        raise arguments.unknown_command(what, why, f"rft-train recipes {near[0]}")
    return 0


def _list() -> None:
    from rich.table import Table
    from rich.text import Text

    from rft_cli.diagnostics.console import SafeConsole

    console = SafeConsole(highlight=False)
    console = console if console.is_terminal else SafeConsole(highlight=False, width=200)

    def show(columns: tuple[str, ...], listed: list[Recipe], cells: Callable[[Recipe], Iterable[str]]) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in columns:
            table.add_column(column, justify="right" if column == "minutes" else "left")
        for recipe in listed:
            table.add_row(Text(recipe.name, "bold"), *map(Text, cells(recipe)))
        console.print(table)

    every = [recipes.load(name) for name in recipes.names()]
    run, not_run = ([recipe for recipe in every if bool(recipe.status) is pending] for pending in (False, True))
    if not every:
        console.print("no recipes are installed")
    if run:
        show(("recipe", "command", "task", "hardware", "minutes", "expected"), run, _measured)
    if not_run:
        console.print(f"\n{_NOT_RUN}" if run else _NOT_RUN)
        show(("recipe", "command", "task", "hardware", "memory of a card"), not_run, _planned)


def _measured(recipe: Recipe) -> tuple[str, ...]:
    expected = f"{recipe.expected} ({recipe.date})" if recipe.date else recipe.expected
    return recipe.command, recipe.task, recipe.hardware, recipe.minutes, expected


def _planned(recipe: Recipe) -> tuple[str, ...]:
    return recipe.command, recipe.task, recipe.hardware, recipe.memory


def _recipe_or_file(name: str) -> Recipe:
    path = Path(name).expanduser()
    return recipes.read(path) if path.suffix in recipes.SUFFIXES and path.is_file() else _recipe(name)


def _recipe(name: str) -> Recipe:
    known = recipes.names()
    if name in known:
        return recipes.load(name)
    near = nearest_names(name, known) or known
    raise DataError(
        code="recipe.not_found",
        what=f"no recipe is called {name}" if name else "the name of a recipe is missing",
        where="command line",
        why=f"nearest: {', '.join(near)}" if near else "no recipes are installed",
        do=f"rft-train recipes show {near[0]}" if near else "rft-train recipes",
    )


def _show(recipe: Recipe, *, resolved: bool, flags: list[str]) -> None:
    if not resolved:
        if flags:
            why = "the file is shown as it is; flags change what --resolved shows"
            do = f"rft-train recipes show {recipe.name} --resolved {' '.join(flags)}"
            raise OptionsError.of(stray_word(f"{flags[0]} has no effect", why, do))
        print(visible(recipe.path.read_text(encoding="utf-8")), end="")
        return
    command = recipe.command if recipe.command in with_settings() else default_command()
    merged = merge(command, ["--config", recipe.name, *flags])
    if merged.problems:
        raise SettingsError(problems=merged.problems)
    print(visible(config_yaml(command, merged.values, merged.origins)), end="")


def _copy(recipe: Recipe, target: Path) -> None:
    try:
        # "x" refuses an existing file in the same operation that makes a new one
        with target.open("x", encoding="utf-8") as file:
            file.write(recipe.path.read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise DataError(
            code="recipe.exists",
            what=f"{target} already exists",
            where="command line",
            why="a copy never overwrites a file",
            state="nothing was changed",
            do=f"rft-train recipes copy {recipe.name} my-{target.name}",
        ) from error
    command = recipe.command or default_command()
    print(f"{target} written; run it with: rft-train {typed(command)} --config {target}{_absent(command, target)}")


def _absent(command: str, file: Path) -> str:
    """Flags for the model and the data, where those that the recipe names are neither here nor on the Hub."""
    values = merge(command, ["--config", str(file)]).values
    places = {name: str(values.get(name) or "") for name in ("pretrain", "prompt_data", "eval_data") if name in values}
    needed = {"pretrain", "prompt_data"}
    return "".join(
        f" --{name} {name.upper()}"
        for name, place in places.items()
        if (place or name in needed) and not (place and _is_found(name, place))
    )


def _is_found(setting: str, place: str) -> bool:
    """Return True for a path that is there, and for a name of the Hub, which the start looks up."""
    on_hub = (dataset_name if setting in DATA_SETTINGS else model_name)(place)
    return on_hub is not None or Path(place).expanduser().exists()
