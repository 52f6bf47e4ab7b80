"""The pages of `rft-train runs`: a table of runs, and one run in detail. They read files only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rft_cli.pages.charts import amount, duration, sparkline
from rft_trainer.runs.reader import SAMPLES_PAGE, RunFiles, is_number, is_run, read_run

CURVES = ("reward/mean", "sft/loss", "policy/kl", "policy/entropy", "completion/length_mean", "policy/gradient_norm")
"""The metrics drawn for one run, where it has them."""

_STYLES = {"running": "cyan", "finished": "green", "done": "green", "stopped": "yellow"}


def find_runs(directory: Path) -> list[RunFiles]:
    """Every run under `directory`, the newest first."""
    paths = [path for path in directory.iterdir() if is_run(path)] if directory.is_dir() else []
    return sorted((read_run(path) for path in paths), key=lambda run: run.touched, reverse=True)


def table_of_runs(runs: Sequence[RunFiles]) -> RenderableType:
    """One line a run."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("run", no_wrap=True, overflow="fold")
    table.add_column("outcome", no_wrap=True)
    for name in ("steps", "reward", "held-out", "time", "last written"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        rewards = run.series("reward/mean")
        table.add_row(
            Text(run.name, "bold"),
            Text(run.outcome, _STYLES.get(run.outcome, "red")),
            str(run.step or run.summary.get("steps", "")),
            amount(rewards[-1]) if rewards else "",
            accuracies(run),
            duration(run.seconds),
            f"{duration(time.time() - run.touched)} ago",
        )
    return table


def accuracies(run: RunFiles) -> str:
    """Held-out accuracy before and after, as far as it is known."""
    before, after = run.accuracy("before"), run.accuracy("after")
    if before is None:
        return ""
    return f"{before:.1%}" if after is None else f"{before:.1%} -> {after:.1%}"


def page_of_run(run: RunFiles) -> RenderableType:
    """Outcome, what was changed, curves, evaluations, and what is on disk."""
    head = Text.assemble((run.name, "bold"), "  ", (run.outcome, _STYLES.get(run.outcome, "red")))
    facts = [f"{run.step} steps" if run.step else "", duration(run.seconds), accuracies(run)]
    parts: list[RenderableType] = [head, Text("  ".join(fact for fact in facts if fact), "dim")]
    if run.command:
        parts.append(_section("command", Text(run.command)))
    for title, content in (
        ("settings that are not defaults", _settings(run)),
        ("curves", _curves(run)),
        ("held-out", _evaluations(run)),
        ("on disk", _files(run)),
    ):
        if content is not None:
            parts.append(_section(title, content))
    return Group(*parts)


def _section(title: str, content: RenderableType) -> RenderableType:
    return Group(Text(), Text(title, "bold cyan"), Padding(content, (0, 0, 0, 2)))


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    return table


def _settings(run: RunFiles) -> RenderableType | None:
    if not run.settings:
        return None
    table = _grid()
    for name, (value, origin) in run.settings.items():
        table.add_row(Text(name), Text(value, "bold"), Text(origin, "dim"))
    return table


def _curves(run: RunFiles) -> RenderableType | None:
    table = _grid()
    for name in CURVES:
        values = run.series(name)
        if values:
            ends = f"{amount(values[0])} -> {amount(values[-1])}"
            table.add_row(Text(name), Text(sparkline(values, 40), "green"), Text(ends))
    return table if table.row_count else None


def _evaluations(run: RunFiles) -> RenderableType | None:
    table = _grid()
    for row in run.evaluations:
        accuracy = row.get("eval/accuracy")
        shown = f"{float(accuracy):.1%}" if is_number(accuracy) else "not scored"
        count = f"n={row['eval/n']}" if "eval/n" in row else ""
        table.add_row(
            Text(str(row.get("name", ""))),
            Text(f"step {row.get('step', '?')}"),
            Text(shown, "bold"),
            Text(count, "dim"),
        )
    return table if table.row_count else None


def _files(run: RunFiles) -> RenderableType | None:
    table = _grid()
    if run.checkpoints:
        table.add_row("checkpoints", Text(", ".join(run.checkpoints)))
    if run.rollout_files:
        table.add_row("rollouts", Text(f"{len(run.rollout_files)} files, the last {run.rollout_files[-1].name}"))
    if (run.path / SAMPLES_PAGE).is_file():
        table.add_row("samples", Text(f"{SAMPLES_PAGE}: sampled answers with their images"))
    table.add_row("directory", Text(str(run.path)))
    return table
