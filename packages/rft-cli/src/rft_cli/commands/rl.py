"""`rft-train rl`: train a policy on rewards of its own responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rft import rl
from rft.resolved import Resolved
from rft.settings import RlSettings
from rft_cli.config.resolve import resolve
from rft_cli.pages import run_summary
from rft_cli.pages.terminal import terminal


def run(argv: list[str]) -> int:
    """Resolve the settings, plan the run and train."""
    train(resolve("rl", argv), ["rft-train", "rl", *argv])
    return 0


def train(
    resolved: Resolved[RlSettings], command: Sequence[str], *, in_place: Path | None = None, show_end: bool = True
) -> Path:
    """Train, then show the end page; returns the run directory. `in_place` continues the run in that directory."""
    trained = rl.train(resolved, command, in_place=in_place, front=terminal())
    if trained.summary is not None and show_end:
        run_summary.show(trained.directory.path, trained.summary, run_summary.after_training(trained.directory.path))
    return trained.directory.path
