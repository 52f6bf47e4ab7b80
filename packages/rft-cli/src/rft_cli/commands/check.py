"""`rft-train check`: resolve a run without starting it, and show everything that it would do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from rft.resolved import Resolved
from rft.settings import RlSettings, SftSettings
from rft_cli.config.resolve import resolve
from rft_core.errors import OptionsError

if TYPE_CHECKING:  # its module imports torch, and `check eval` needs none
    from rft.process.machine import Machine

COMMANDS = ("rl", "sft", "eval", "generate")
USAGE = """usage: rft-train check [rl|sft|eval|generate] [OPTIONS]

Resolve the command with these options and start nothing: every setting with where its value came from,
the files, the batch arithmetic, one row as the model will see it, and which of its tokens are learned.
Without a command word, rl is meant."""


def run(argv: list[str]) -> int:
    """Show the resolved run; the exit code says whether it would start."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    command, words = ("rl", argv)
    if argv and not argv[0].startswith("-"):
        command, words = argv[0], argv[1:]
    if command not in COMMANDS:
        raise OptionsError(
            code="check.unknown_command",
            what=f"check cannot resolve {command!r}",
            where="command line",
            why=f"it resolves one of {', '.join(COMMANDS)}",
            do=f"rft-train check {COMMANDS[0]}",
        )
    resolved = resolve(command, words)
    print(resolved.config_yaml)
    if command in ("rl", "sft"):
        from rft.process.machine import open_machine

        with open_machine(resolved.settings.model.device) as machine:
            if machine.is_first and command == "rl":
                _check_rl(resolved, machine)
            elif machine.is_first:
                _check_sft(resolved, machine)
    else:
        # the plan page of rl and sft shows the notes itself
        for note in resolved.notes:
            print(f"note: {note}")
    print(f"rft-train {command} would start with these settings; nothing was started")
    return 0


def _check_rl(resolved: Resolved[RlSettings], machine: Machine) -> None:
    from rft.check import RlCheck
    from rft_cli.pages import run_plan

    checked = RlCheck.of(resolved.settings, machine.ranks.world_size)
    run_plan.show_rl(resolved, checked.data, machine)
    checked.check_reward()
    _check_save_path(resolved.settings.checkpoint.save_path)
    prompt, pieces = checked.data.prompts[0], checked.first_prompt()
    print(f"prompt {prompt.prompt_id} as the model sees it ({len(pieces)} tokens; label {prompt.label!r}):")
    _show_tokens([*pieces, "<response>"], [False] * len(pieces) + [True])


def _check_sft(resolved: Resolved[SftSettings], machine: Machine) -> None:
    from rft.check import SftCheck
    from rft_cli.pages import run_plan

    checked = SftCheck.of(resolved.settings)
    run_plan.show_sft(resolved, checked.data, machine)
    _check_save_path(resolved.settings.checkpoint.save_path)
    sample = checked.data.samples[0]
    print(f"demonstration {sample.sample_id} as the model sees it ({sample.num_tokens} tokens):")
    _show_tokens(*checked.first_sample())


def _show_tokens(pieces: Sequence[str], learned: Sequence[bool]) -> None:
    """Tokens in one line of text, then the loss mask: learned tokens are green on a terminal."""
    text = Text()
    for piece, wanted in zip(pieces, learned, strict=True):
        text.append(piece, style="bold green" if wanted else "dim")
    console = Console(highlight=False)
    console.print(text, soft_wrap=True)
    console.print("loss mask (1 = learned): " + "".join("1" if wanted else "0" for wanted in learned), soft_wrap=True)
    console.print()


def _check_save_path(save_path: str) -> None:
    """Raise the error of the start where `save_path` holds a run already."""
    if save_path:
        from rft.run_lifecycle import refuse_existing

        refuse_existing(Path(save_path).expanduser())
