"""`rft-train sft`: train a model on demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rft import sft
from rft.resolved import Resolved
from rft.run_lifecycle import final_model
from rft.settings import SftSettings
from rft_cli.config.resolve import resolve
from rft_cli.pages import run_summary
from rft_cli.pages.terminal import terminal


def run(argv: list[str]) -> int:
    """Resolve the settings, plan the run and train."""
    train(resolve("sft", argv), ["rft-train", "sft", *argv])
    return 0


def train(
    resolved: Resolved[SftSettings], command: Sequence[str], *, in_place: Path | None = None, show_end: bool = True
) -> Path:
    """Train, then show the end page; returns the run directory. `in_place` continues the run in that directory."""
    trained = sft.train(resolved, command, in_place=in_place, front=terminal())
    if trained.summary is not None and show_end:
        run_summary.show(trained.directory.path, trained.summary, _next(trained.directory.path))
    return trained.directory.path


def _next(path: Path) -> list[tuple[str, str]]:
    model = final_model(path)
    return [
        (f"rft-train generate --pretrain {model} --prompt 'your text'", "see what it answers"),
        (f"rft-train rl --pretrain {model} --prompt_data train.jsonl", "go on with reinforcement learning from it"),
        (f"rft-train runs show {path}", "curves, settings and files of this run"),
    ]
