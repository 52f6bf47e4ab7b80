"""`rft-train check`: resolve a command without starting it, and show everything that it would do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rft.config.command_record import TrainingRecord
from rft.config.commands import load, typed
from rft.resolved import Resolved
from rft_cli.config.recipes import names, with_command
from rft_cli.config.resolve import resolve
from rft_cli.diagnostics.console import SafeConsole
from rft_cli.records.discovery import default_command, find_command, prepared, with_settings, with_training
from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
from rft_core.terminal_text import visible

if TYPE_CHECKING:  # its module imports torch, and `check eval` needs none
    from rft.check import TokenizedExample
    from rft.process.machine import Machine

USAGE = """usage: rft-train check [COMMAND | RECIPE] [OPTIONS]

Resolve COMMAND with these options and start nothing: the settings that are not defaults, with where each value came
from. Of a command that trains also its ranks, the files, the batch arithmetic, one row as the model will see it, and
which of its tokens are learned. RECIPE stands for its command and --config.
"""


def run(argv: list[str]) -> int:
    """Show the resolved run; the exit code says whether it would start."""
    if any(word in ("-h", "--help") for word in argv):
        print(f"{USAGE}Without a command word, {default_command()} is meant. Commands: {', '.join(with_settings())}")
        return 0
    known = with_settings()
    argv = with_command(argv, known)
    command, words = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (default_command(), argv)
    if command not in known:
        raise OptionsError(
            code="check.unknown_command",
            what=f"check cannot resolve {command!r}",
            where="command line",
            why=f"it resolves one of {', '.join(known)}, or a recipe",
            do=f"rft-train check {(nearest_names(command, [*with_training(), *names()]) or [default_command()])[0]}",
        )
    resolved = resolve(command, words)
    print(visible(_chosen_settings(resolved, " ".join([command, *words]))))
    training = find_command(command).training
    if training is None:
        print(*(visible(f"note: {note}\n") for note in resolved.notes), sep="", end="")
    else:
        from rft.process.launching import requested_run, unstarted_grid
        from rft.process.machine import of_unstarted_ranks, open_machine

        request = requested_run(resolved)
        grid = unstarted_grid(request)
        # the checks of the start: of the ranks that --nproc would start, as far as one process can make them
        with open_machine(resolved.settings.model.device, request if grid is None else None) as machine:
            if machine.is_first:
                shown = machine if grid is None else of_unstarted_ranks(machine, grid)
                _check_training(training, prepared(training, resolved), shown)
    print(f"rft-train {typed(command)} would start with these settings; nothing was started")
    return 0


def _chosen_settings(resolved: Resolved[Any], words: str) -> str:
    """YAML of the settings that are not defaults, with their origins, and the command that shows them all."""
    lines: list[str] = []
    for line in resolved.config_yaml.splitlines():
        if line.startswith("# ") and not line.endswith("required, not given"):
            continue  # the title of a group
        if not line.endswith("# default"):
            lines.append(line)
    count = sum(origin.kind == "default" for origin in resolved.origins.values())
    others = f"# {count} others have their defaults; --print_config instead of `check` shows them"
    return "\n".join([f"# rft-train {typed(words.partition(' ')[0])}", *filter(None, lines), others, ""])


def _check_training(training: TrainingRecord, resolved: Resolved[Any], machine: Machine) -> None:
    from rft.hub.run_settings import without_weights
    from rft_cli.pages import run_plan

    resolved = load(training.fit)(resolved, machine) if training.fit else resolved
    with without_weights(resolved) as (resolved, listed):
        checked = load(training.check)(resolved.settings, machine.ranks.world_size)
        run_plan.show(training, resolved, checked.data, machine)
        trials = checked.check_reward()
    for weights in listed:
        print(visible(f"note: {weights}\n"))
    for trial in trials:
        print(visible("\n".join([*trial.lines(), ""])))
    _check_save_path(resolved.settings.checkpoint.save_path)
    _show_example(checked.first_example())
    for trial in trials:
        trial.require_score()


def _show_example(example: TokenizedExample) -> None:
    """Tokens in one line of text, then the loss mask: learned tokens are green on a terminal."""
    print(visible(example.title))
    styles = ("bold green" if learned else "dim" for learned in example.learned)
    text = Text.assemble(*zip(example.pieces, styles, strict=True))
    console = SafeConsole(highlight=False)
    console.print(text, soft_wrap=True)
    mask = "".join("1" if learned else "0" for learned in example.learned)
    console.print(f"loss mask (1 = learned): {mask}", soft_wrap=True)
    passages = "".join(p if learned else "\0" for p, learned in zip(example.pieces, example.learned, strict=True))
    console.print(f"learned: {', '.join(map(repr, filter(None, passages.split(chr(0)))))}", soft_wrap=True)
    console.print()


def _check_save_path(save_path: str) -> None:
    """Raise the error of the start where `save_path` holds a run already."""
    if save_path:
        from rft.run_lifecycle import refuse_existing

        refuse_existing(Path(save_path).expanduser())
