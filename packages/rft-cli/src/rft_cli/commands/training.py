"""Commands that train: resolve the settings, plan the run, train, and show its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rft.config.commands import load
from rft.resolved import Resolved
from rft_cli.config.resolve import resolve
from rft_cli.records.discovery import find_command, training_of
from rft_core.terminal_text import visible


def run(command: str, argv: Sequence[str]) -> int:
    """Run `rft-train COMMAND ARGV...`, where COMMAND has a record of training."""
    train(resolve(command, argv), ["rft-train", command, *argv])
    return 0


def act(command: str, argv: Sequence[str]) -> int:
    """Run `rft-train COMMAND ARGV...`, where COMMAND acts on its settings and trains nothing."""
    for line in load(find_command(command).act)(resolve(command, argv)):
        print(visible(line), flush=True)
    return 0


def train(
    resolved: Resolved[Any], words: Sequence[str], *, in_place: Path | None = None, show_end: bool = True
) -> Path:
    """Train, then show the end page; returns the run directory. `in_place` continues the run in that directory.

    `words` is what is written into the run directory as the way to start it again.
    """
    # here, so that commands which train nothing do not wait for torch
    from rft_cli.pages import run_summary
    from rft_cli.pages.terminal import terminal

    training = training_of(resolved.command)
    trained = load(training.train)(resolved, words, in_place=in_place, front=terminal(training))
    path: Path = trained.directory.path
    if trained.summary is not None and show_end:
        run_summary.show(path, trained.summary, load(training.next_commands)(path))
    return path
