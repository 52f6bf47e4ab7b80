"""Sections of a report that are tables: how the run ended, its settings, where its time went, what was left out."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from math import fsum

from rft_trainer.health.watch import Alarm
from rft_trainer.runs.reader import RunFiles, as_object, is_number
from rft_trainer.runs.verdict import RunFinding

PHASES = ("data", "rollout", "reward", "tools", "logprob", "train", "sync", "eval", "save", "other")
_OF_RECIPE = "recipe"


def sentence(run: RunFiles, main: str, *, less_is_better: bool) -> str:
    """Return the outcome in one sentence: how the run ended, after how much, and how its main number moved."""
    steps = run.step or int(as_object(run.summary).get("steps") or 0)
    took = f" in {_duration(run.seconds)}" if run.seconds else ""
    ending = {"finished": "finished", "running": "is running", "stopped": "stopped without an end"}
    text = f"The run {ending.get(run.outcome, run.outcome)} after {steps:,} {'step' if steps == 1 else 'steps'}{took}"
    values = run.series(main)
    if len(values) > 1:
        window = max(1, len(values) // 10)
        first, last = fsum(values[:window]) / window, fsum(values[-window:]) / window
        moved = (last < first) == less_is_better if last != first else None
        how = "did not move" if moved is None else ("improved" if moved else "got worse")
        part = "its first tenth" if window > 1 else "its first step"
        text += f"; {main} {how}, from {first:.4g} in {part} to {last:.4g} at the end"
    return text + "."


def evaluations(run: RunFiles) -> str:
    """Return the table of the evaluations before and after; empty where there was none."""
    found = as_object(run.summary.get("eval"))
    before, after = as_object(found.get("before")), as_object(found.get("after"))
    names = [name for name, value in after.items() if is_number(value)]
    if not names:
        return ""
    rows = [(name, _number(before.get(name)), _number(after[name])) for name in names]
    return section("held-out rows", "Held-out rows", table(("number", "before", "after"), rows))


def findings(found: Sequence[RunFinding]) -> str:
    """Return what the rows show to be wrong with the run, and what to look at."""
    if not found:
        return section("verdict", "Verdict", "<p>The rows of this run show nothing wrong.</p>")
    rows = [(finding.what, finding.do) for finding in found]
    return section("verdict", "Verdict", table(("what the rows show", "what to look at"), rows))


def health(alarms: Sequence[Alarm]) -> str:
    """Return what the detectors found step by step; empty where they found nothing."""
    if not alarms:
        return ""
    rows = [(str(one.step), one.level, one.name, one.what, one.do, f"--{one.setting}") for one in alarms]
    heads = ("step", "level", "detector", "what the rows show", "what to look at", "setting")
    return section("health", "Health", table(heads, rows))


def settings(run: RunFiles) -> str:
    """Return the settings that are no defaults: those that differ from the recipe first, then the recipe's own."""
    own = [(name, *pair) for name, pair in run.settings.items() if not pair[1].startswith(_OF_RECIPE)]
    of_recipe = [(name, *pair) for name, pair in run.settings.items() if pair[1].startswith(_OF_RECIPE)]
    heads = ("setting", "value", "from")
    body = table(heads, own) if own else "<p>None beside the recipe's.</p>"
    if of_recipe:
        body += f"<details><summary>the recipe's {len(of_recipe)}</summary>{table(heads, of_recipe)}</details>"
    return section("settings", "Settings that are no defaults", body)


def phase_seconds(run: RunFiles) -> dict[str, float]:
    """Return the seconds that the steps of a run spent in each phase, of those that took any."""
    seconds = {name: fsum(run.series(f"time/{name}")) for name in PHASES}
    return {name: value for name, value in seconds.items() if value > 0}


def phases(run: RunFiles) -> str:
    """Return where the time of all steps went, as one bar and its table."""
    seconds = phase_seconds(run)
    total = fsum(seconds.values())
    if not total:
        return ""
    bar = "".join(
        f'<span class="phase phase-{PHASES.index(name)}" style="flex-grow:{value / total:.4f}" title="{name} '
        f'{value / total:.1%}"></span>'
        for name, value in seconds.items()
    )
    rows = [
        (f"<span class='key phase-{PHASES.index(name)}'></span>{name}", _duration(value), f"{value / total:.1%}")
        for name, value in sorted(seconds.items(), key=lambda pair: -pair[1])
    ]
    body = f'<div class="bar" role="img" aria-label="shares of the time">{bar}</div>'
    body += table(("phase", "time", "share"), rows, escaped=False)
    return section("time", "Where the time went", body)


def drop_counts(run: RunFiles) -> dict[str, float]:
    """Return how many responses were left out of updates, by reason."""
    names = sorted({name for row in run.metrics for name in row if name.startswith("drop/")})
    counts = {name.removeprefix("drop/").replace("_", " "): fsum(run.series(name)) for name in names}
    return {reason: count for reason, count in counts.items() if count}


def left_out(run: RunFiles) -> str:
    """Return how many responses were left out of updates, by reason; empty where none was."""
    rows = [(name, f"{count:,.0f}") for name, count in drop_counts(run).items()]
    return section("left-out", "Responses left out", table(("reason", "responses"), rows)) if rows else ""


def section(identifier: str, title: str, body: str) -> str:
    """Return a section of the page; `body` is HTML."""
    return f'<section id="{identifier.replace(" ", "-")}"><h2>{html.escape(title)}</h2>{body}</section>'


def table(heads: Iterable[str], rows: Iterable[Sequence[object]], *, escaped: bool = True) -> str:
    """Return a table; cells are texts, or HTML with `escaped` false."""
    head = "".join(f'<th scope="col">{html.escape(text)}' for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell)) if escaped else cell}" for cell in row) for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</thead><tbody>{body}</tbody></table></div>'


def _number(value: object) -> str:
    return f"{value:.4g}" if is_number(value) else ""


def _duration(seconds: float | None) -> str:
    rounded = round(seconds or 0.0)
    if rounded < 60:
        return f"{seconds or 0.0:.1f} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
