"""The pages of `rft-train runs`: a table of runs, and one run in detail. They read files only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rft.config.command_record import Measure, TrainingRecord
from rft_cli.pages.advice import health_of_run, verdict_of_run
from rft_cli.pages.charts import amount, duration, sparkline
from rft_cli.records.discovery import commands, training_of, with_training
from rft_trainer.runs.reader import SAMPLES_PAGE, RunFiles, as_object, is_number

_STYLES = {"running": "cyan", "finished": "green", "done": "green", "stopped": "yellow"}


def trainings_of(run: RunFiles) -> list[TrainingRecord]:
    """Return the record of the command that made a run; of a command that is not here, those of all commands."""
    made_by = commands().get(run.verb)
    if made_by is not None and made_by.training is not None:
        return [made_by.training]
    return [training_of(name) for name in with_training()]


def table_of_runs(runs: Sequence[RunFiles]) -> RenderableType:
    """One line a run."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("run", no_wrap=True, overflow="fold")
    table.add_column("outcome", no_wrap=True)
    measures = [training.measure for run in runs for training in trainings_of(run) if run.series(training.measure.name)]
    labels = list(dict.fromkeys(measure.label for measure in measures))
    for name in ("steps", *labels, "held-out", "time", "last written"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            Text(run.name, "bold"),
            Text(run.outcome, _STYLES.get(run.outcome, "red")),
            str(run.step or run.summary.get("steps", "")),
            *(_last(run, label) for label in labels),
            held_out(run),
            duration(run.seconds),
            f"{duration(time.time() - run.touched)} ago" if run.touched else "",
        )
    notes = [Text(f"{run.name}: {damage}", "yellow") for run in runs for damage in run.damage]
    return Group(table, *notes)


def _last(run: RunFiles, label: str) -> str:
    """Return the last number of the measure with this label, where the run's command has it."""
    measures = [training.measure for training in trainings_of(run) if training.measure.label == label]
    numbers = [run.series(measure.name) for measure in measures]
    return next((amount(series[-1]) for series in numbers if series), "")


def held_out(run: RunFiles) -> str:
    """Held-out number before and after, as far as it is known, named unless it is a share."""
    for training in trainings_of(run):
        measure = training.held_out
        both = [run.measured(measure.name, when) for when in ("before", "after")]
        shown = " -> ".join(_number(number, measure) for number in both if number is not None)
        if both[0] is not None:
            return shown if measure.is_share else f"{measure.name} {shown}"
    return ""


def _number(number: float, measure: Measure) -> str:
    return f"{number:.1%}" if measure.is_share else f"{number:.4f}"


def page_of_run(run: RunFiles) -> RenderableType:
    """Outcome, what was changed, curves, evaluations, and what is on disk."""
    head = Text.assemble((run.name, "bold"), "  ", (run.outcome, _STYLES.get(run.outcome, "red")))
    facts = [f"{run.step} steps" if run.step else "", duration(run.seconds), held_out(run)]
    parts: list[RenderableType] = [head, Text("  ".join(fact for fact in facts if fact), "dim")]
    parts += [Text(damage, "yellow") for damage in run.damage]
    if run.command:
        parts.append(_section("command", Text(run.command)))
    for title, content in (
        ("verdict", verdict_of_run(run)),
        ("health", health_of_run(run)),
        ("settings that are not defaults", _settings(run)),
        ("curves", _curves(run)),
        ("held-out", _evaluations(run)),
        ("calibration of the last evaluation", _calibration(run)),
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
    curves = [name for training in trainings_of(run) for name in training.curves.split()]
    for name in dict.fromkeys(curves):
        values = run.series(name)
        if values:
            ends = f"{amount(values[0])} -> {amount(values[-1])}"
            table.add_row(Text(name), Text(sparkline(values, 40), "green"), Text(ends))
    return table if table.row_count else None


def _evaluations(run: RunFiles) -> RenderableType | None:
    table = _grid()
    measures = [training.held_out for training in trainings_of(run)]
    for row in run.evaluations:
        found = [(measure, row.get(f"eval/{measure.name}")) for measure in measures]
        numbers = [
            f"{measure.name} {_number(value, measure)}{_ends(row, measure)}"
            for measure, value in found
            if is_number(value)
        ]
        numbers += [line for measure, _ in found for line in _by_set(row, measure)]
        shown = "  ".join(numbers) or "not scored"
        count = f"n={row['eval/n']}" if "eval/n" in row else ""
        table.add_row(
            Text(str(row.get("name", ""))),
            Text(f"step {row.get('step', '?')}"),
            Text(shown, "bold"),
            Text(count, "dim"),
        )
    return table if table.row_count else None


def _by_set(row: Mapping[str, Any], measure: Measure) -> list[str]:
    """Return the number of each of several held-out sets, where the evaluation has them."""
    end = f"/{measure.name}"
    names = [key for key in row if key.startswith("eval/") and key.endswith(end)]
    # eval/NAME is of all sets, eval/SET/NAME of one
    sets = [(key, key.removeprefix("eval/").removesuffix(end)) for key in names if key != f"eval{end}"]
    return [f"{name} {_number(row[key], measure)}" for key, name in sets if is_number(row[key])]


def _ends(row: Mapping[str, Any], measure: Measure) -> str:
    """Return the 95 % interval of a number, where the evaluation has written it."""
    ends = [row.get(f"eval/{measure.name}_{end}") for end in ("low", "high")]
    return (
        f" ({' to '.join(_number(end, measure) for end in ends if is_number(end))})"
        if all(map(is_number, ends))
        else ""
    )


def _calibration(run: RunFiles) -> RenderableType | None:
    """Show how sure a reward model was of its preferences, and how often it was right."""
    last = run.evaluations[-1] if run.evaluations else {}
    bins = last.get("calibration")
    if not isinstance(bins, list) or not bins:
        return None
    table = _grid()
    for one in map(as_object, cast("list[Any]", bins)):
        bar = "#" * round(20 * float(one.get("observed", 0.0)))
        table.add_row(
            Text(f"sure {one.get('low', 0.0):.0%} to {one.get('high', 0.0):.0%}"),
            Text(f"predicted {one.get('predicted', 0.0):.1%}"),
            Text(f"right {one.get('observed', 0.0):.1%}", "bold"),
            Text(f"n={one.get('num', 0)}", "dim"),
            Text(bar, "green"),
        )
    error = last.get("eval/calibration_error")
    return Group(table, Text(f"expected calibration error {error:.4f}")) if is_number(error) else table


def _files(run: RunFiles) -> RenderableType | None:
    table = _grid()
    if run.checkpoints:
        table.add_row("checkpoints", Text(", ".join(run.checkpoints)))
    if run.rollout_files:
        table.add_row("rollouts", Text(f"{len(run.rollout_files)} files, the last {run.rollout_files[-1].name}"))
    if (run.path / SAMPLES_PAGE).is_file():
        table.add_row("samples", Text(f"{SAMPLES_PAGE}: sampled answers, for a browser"))
    table.add_row("directory", Text(str(run.path)))
    return table
