"""End page of a run: before and after, sample answers, directory, commands to try next."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from rft.stages.evaluate import change_interval
from rft_cli.diagnostics.console import SafeConsole
from rft_cli.pages import samples_html
from rft_cli.pages.advice import health_lines, next_lines, speed_line, verdict_lines
from rft_cli.pages.pretraining.end_page import curve_lines, is_continued, text_table
from rft_core.errors import StorageError
from rft_trainer.runs.reader import UNSCORED_KIND, RunFiles, is_number, read_run, rows

_WIDTH = 60
_MEASURED = {
    "accuracy": "accuracy",
    "reward": "mean reward",
    "loss": "loss",
    "first_error": "first error found",
    "calibration_error": "calibration error",
    "turns_mean": "turns of a conversation",
    "call_share": "turns with a well-formed call",
    "well_formed_share": "calls that could be read",
}
_SHARES = ("accuracy", "first_error", "call_share", "well_formed_share")


def show(path: Path, summary: Mapping[str, Any], next_commands: Sequence[tuple[str, str]]) -> None:
    """Print the page of the run at `path` to standard output."""
    run = read_run(path)
    console = SafeConsole(highlight=False, soft_wrap=False)
    console.print()
    evaluations = summary.get("eval", {})
    if "before" in evaluations and "after" in evaluations:
        # no table without a row: nothing was held out
        if (table := _before_after(run, evaluations)).row_count:
            console.print(table)
        if "best_step" in evaluations["after"]:
            console.print(
                f"the weights are those of step {evaluations['after']['best_step']}, the lowest held-out loss"
            )
    _show_texts(console, run)
    samples = _last_samples(run, 3)
    if samples:
        console.print(_samples(samples, run.rollout_files[-1].parent))
    minutes, seconds = divmod(round(float(summary.get("seconds", 0.0))), 60)
    console.print(
        f"{summary['outcome']} after {summary.get('steps', 0)} steps, {minutes} min {seconds:02d} s", markup=False
    )
    found = verdict_lines(summary)
    if found is not None:
        console.print(found, soft_wrap=True)
    if (health := health_lines(summary, beyond_verdict=True)) is not None:
        console.print(health, soft_wrap=True)
    if (bound := speed_line(summary)) is not None:
        console.print(bound, soft_wrap=True)
    if unscored := _unscored(run):
        console.print(unscored, markup=False, soft_wrap=True)
    console.print(f"run directory: {path}", markup=False)
    try:
        page = samples_html.write(path)
    except StorageError as error:  # the run has ended well; this page can be had again from its rows
        page = None
        console.print(f"no page of samples: {error.problem.what}", markup=False, soft_wrap=True)
    if page is not None:
        what = "texts and loss" if run.verb == "pretrain" else "sampled answers"
        console.print(f"{what}, for a browser: {page}", markup=False, soft_wrap=True)
    console.print()
    for line in next_lines(next_commands):
        console.print(line, markup=False, soft_wrap=True)


def _show_texts(console: SafeConsole, run: RunFiles) -> None:
    """Print the loss of a pre-training run, and the texts that its model continued."""
    if run.verb == "pretrain":
        for line in curve_lines(run):
            console.print(line, markup=False)
    kept = rows(run.rollout_files[-1]) if run.rollout_files else []
    if is_continued(kept):
        step = int(run.rollout_files[-1].stem.removeprefix("step_"))
        console.print(f"texts that the model of step {step} continued")  # no title, which a narrow table would break
        console.print(text_table(kept))


def _unscored(run: RunFiles) -> str:
    """Numbers of responses without a reward over the run, by kind of failure; empty where all had one."""
    kinds: Counter[str] = Counter()
    for row in run.metrics:
        kinds.update({key: int(row[key]) for key in row if key.startswith(UNSCORED_KIND) and is_number(row[key])})
    if not kinds:
        return ""
    total = int(sum(run.series("data/samples")))
    shown = ", ".join(f"{kind.removeprefix(UNSCORED_KIND)} {count:,}" for kind, count in kinds.most_common())
    logs = sorted(file.name for file in (run.path / "logs").glob("reward-*.log"))
    where = f"; {run.path / 'logs' / logs[0]}" if logs else ""
    return f"without a reward: {kinds.total():,} of {total:,} responses ({shown}){where}"


def _before_after(run: RunFiles, evaluations: Mapping[str, Any]) -> Table:
    before, after = evaluations["before"], evaluations["after"]
    # steps that a reward model judges, pairs that it compares, or problems that are answered
    noun = "step" if "first_error" in after else "pair" if "calibration_error" in after else "problem"
    counted = f"held out: {after.get('n', '?')} {noun}s"
    table = Table(title=counted if "n" in after else "held out", title_justify="left")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="right" if column else "left")
    for key, label in _MEASURED.items():
        if _is_shown(key, before, after):
            is_share = key in _SHARES
            shown = "{:.1%}" if is_share else "{:.4f}"
            change = f"{after[key] - before[key]:+.1%}" if is_share else f"{after[key] - before[key]:+.4f}"
            label = f"loss (nats a {noun})" if key == "loss" and noun != "problem" else label
            table.add_row(label, shown.format(before[key]), shown.format(after[key]), change + _interval(run, key))
    return table


def _is_shown(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return True when both evaluations measured `key`; tool calls only where there was one."""
    if not (isinstance(before.get(key), float) and isinstance(after.get(key), float)):
        return False
    return key != "call_share" or before[key] > 0 or after[key] > 0


def _interval(run: RunFiles, key: str) -> str:
    """The paired 95 % interval of the change, where both evaluations kept a number a prompt."""
    column = {"accuracy": "correct", "reward": "rewards"}.get(key)
    named = {row.get("name"): row for row in run.evaluations}
    if column is None or not all(named.get(name, {}).get(column) for name in ("before", "after")):
        return ""
    interval = change_interval(named["before"][column], named["after"][column])
    if interval is None:
        return ""
    scale, unit = (100.0, " points") if key == "accuracy" else (1.0, "")
    return f"  (95 %: {scale * interval.low:+.3g} to {scale * interval.high:+.3g}{unit})"


def _last_samples(run: RunFiles, number: int) -> list[dict[str, Any]]:
    """Sampled answers of the last step that kept some: the best, the worst, and one between."""
    kept = rows(run.rollout_files[-1]) if run.rollout_files else []
    ordered = sorted((row for row in kept if row.get("reward") is not None), key=lambda row: row["reward"])
    if len(ordered) <= number:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (number - 1))] for i in range(number)]


def _samples(samples: Sequence[Mapping[str, Any]], directory: Path) -> Table:
    """Prompts, answers and rewards, and where the images are if there are any."""
    images = [samples_html.image_words(row, directory) for row in samples]
    table = Table(title="sampled answers of the last recorded step", title_justify="left")
    for column in (*(("image",) if any(images) else ()), "prompt", "answer", "wanted", "reward"):
        table.add_column(column, justify="right" if column == "reward" else "left", overflow="fold")
    for row, seen in zip(samples, images, strict=True):
        cells = [_short(row["prompt"]), _short(row["response"]), _short(str(row["label"])), f"{row['reward']:.3g}"]
        table.add_row(*([escape(seen)] if any(images) else []), *cells)
    return table


def _short(text: str) -> str:
    """Return the end of a long text, where answers are, escaped so that control characters show."""
    plain = json.dumps(text, ensure_ascii=False)[1:-1].replace("[", "\\[")
    return plain if len(plain) <= _WIDTH else "..." + plain[-_WIDTH:]
