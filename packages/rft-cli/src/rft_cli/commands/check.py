"""`rft-train check`: resolve a run without starting it, and show everything that it would do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rft.resolved import Resolved
from rft.settings import RlSettings, SftSettings
from rft_cli.config.resolve import resolve
from rft_core.errors import OptionsError

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
        for note in resolved.notes:
            print(f"note: {note}")
    print(f"rft-train {command} would start with these settings; nothing was started")
    return 0


def _check_rl(resolved: Resolved[RlSettings], machine: object) -> None:
    from rft.build.environment import enter_environment
    from rft.build.images import codec_with_images
    from rft.build.rewards import check_reward
    from rft.build.rl_data import rl_data
    from rft.process.machine import Machine
    from rft_cli.pages import run_plan
    from rft_models.loading.context_length import model_facts

    assert isinstance(machine, Machine)
    settings = resolved.settings
    codec = codec_with_images(settings.model, settings.images)
    model_facts(settings.model.pretrain)
    with ExitStack() as opened:
        enter_environment(settings.conversation, codec, opened)
        data = rl_data(settings, codec, machine.ranks.world_size)
    run_plan.show_rl(resolved, data, machine)
    check_reward(settings)
    _check_save_path(settings.checkpoint.save_path)
    prompt = data.prompts[0]
    print(f"prompt {prompt.prompt_id} as the model sees it ({len(prompt.token_ids)} tokens; label {prompt.label!r}):")
    pieces = [codec.decode([token]) for token in prompt.token_ids]
    _show_tokens([*pieces, "<response>"], [False] * len(pieces) + [True])


def _check_sft(resolved: Resolved[SftSettings], machine: object) -> None:
    from rft.build.images import codec_with_images
    from rft.process.machine import Machine
    from rft.sft import sft_data
    from rft_cli.pages import run_plan
    from rft_models.loading.context_length import model_facts
    from rft_trainer.batches.packing import pack

    assert isinstance(machine, Machine)
    settings = resolved.settings
    codec = codec_with_images(settings.model, settings.images)
    model_facts(settings.model.pretrain)
    data = sft_data(settings, codec, model_facts(settings.model.pretrain).max_positions)
    run_plan.show_sft(resolved, data, machine)
    _check_save_path(settings.checkpoint.save_path)
    sample = data.samples[0]
    print(f"demonstration {sample.sample_id} as the model sees it ({sample.num_tokens} tokens):")
    mask = [bool(learned) for learned in pack([sample]).loss_mask_T]
    _show_tokens([codec.decode([token]) for token in sample.token_ids], mask)


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
    if save_path and (Path(save_path).expanduser() / "config.yaml").exists():
        raise OptionsError(
            code="run.exists",
            what=f"{save_path} already holds a run",
            where="--save_path",
            why="a fresh start never writes over an earlier run",
            state="the earlier run is untouched; nothing was started",
            do=f"rft-train resume {save_path}",
        )
