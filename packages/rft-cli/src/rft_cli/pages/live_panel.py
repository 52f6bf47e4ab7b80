"""Live display of a run: one panel on a terminal, one line a step elsewhere.

`LivePanel` is a sink: the loop hands it the same records that go to metrics.jsonl. It never reads
files and never fails for a metric that is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rft.config.command_record import Measure, TrainingRecord
from rft_cli.diagnostics.console import SafeConsole
from rft_cli.pages.advice import verdict_lines
from rft_cli.pages.charts import amount, duration, shares, sparkline, wrapped
from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs.reader import UNSCORED_KIND, as_object, is_number

Record = Mapping[str, object]

PHASES = {
    "rollout": "cyan",
    "reward": "yellow",
    "logprob": "magenta",
    "train": "green",
    "sync": "blue",
    "eval": "white",
    "save": "red",
}
"""The phases of a step (seconds under time/<name>) with their colours."""

_ROUNDING = 1e-9
"""Values below are rounding errors: the divergence within a step of one update is one."""
_SPEED = {"tok/s": "time/tokens_per_second", "samples/min": "time/samples_per_minute"}
"""What a plain line shows at its end, for every command."""


class LivePanel:
    """Shows a run. On a terminal one panel that is redrawn; elsewhere a plain line every `log_interval` steps.

    Example::

        panel = LivePanel(training_of(command), log_interval=10)
        panel.start({"run_name": "quickstart", "num_steps": 40})
        panel.step({"step": 1, "num_steps": 40, "reward/mean": 0.25, "time/step": 0.5})
        panel.finish({"outcome": "finished"})
    """

    def __init__(
        self,
        training: TrainingRecord,
        *,
        log_interval: int = 1,
        stream: TextIO | None = None,
        console: Console | None = None,
    ) -> None:
        """`training` is the record of the run's command: what is measured of its steps and evaluations."""
        self._training = training
        self._console = console or SafeConsole(file=stream or sys.stdout, highlight=False)
        self._log_interval = max(1, log_interval)
        self._live: Live | None = None
        self._info: Record = {}
        self._last: Record = {}
        self._scores: list[float] = []
        self._held_out_scores: list[tuple[int, float]] = []

    def start(self, info: Record) -> None:
        """Begin the display of a run: `run_name`, `run_directory`, `num_steps`, and anything else as `name: text`."""
        self._info = dict(info)
        if self._console.is_terminal:
            # drawn when a record comes, so that no thread redraws beside the loop
            self._live = Live(self.render(), console=self._console, auto_refresh=False, transient=False)
            self._live.start(refresh=True)
        elif info:
            facts = "  ".join(f"{name}={value}" for name, value in info.items() if value not in ("", None))
            self._console.print(f"start  {facts}", soft_wrap=True, markup=False)

    def step(self, record: Record) -> None:
        """Show a step that ended; `record` is its row of metrics."""
        # what a step does not report keeps its last value
        # but for failures, which are there only where there are any
        kept = {name: value for name, value in self._last.items() if not name.startswith("reward/unscored")}
        self._last = {**kept, **record}
        score = _number(record, self._training.measure.name)
        if score is not None:
            self._scores.append(score)
        number, total = self._position()
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
        # the last step is always printed
        elif number % self._log_interval == 0 or number == total:
            line = plain_line({"num_steps": total, **record}, self._training)
            self._console.print(line, soft_wrap=True, markup=False)

    def evaluation(self, record: Record) -> None:
        """Show an evaluation of the held-out rows."""
        step = int(_number(record, "step") or 0)
        score = _number(record, f"eval/{self._training.held_out.name}")
        if score is not None:
            self._held_out_scores.append((step, score))
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
        else:
            scores = " ".join(
                f"{k.removeprefix('eval/')}={_brief(v)}"
                for k, v in record.items()
                if k.startswith(("eval/", "eval_ema/"))
            )
            # a run without held-out rows has evaluations that measure nothing
            if scores:
                name = str(record.get("name", ""))
                # an evaluation between the first and the last is named by its step
                words = ["eval  ", f"step {step}", *([name] if name not in ("", f"step {step}") else []), scores]
                self._console.print(*words, soft_wrap=True, markup=False)

    def finish(self, summary: Record) -> None:
        """Show the end of the run; `summary` is the content of summary.json."""
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
            self._live.stop()
            self._live = None
        self._console.print(outcome_line(summary, self._training.held_out), soft_wrap=True, markup=False)
        # the page of a run that finished shows it below the figures that it is about
        found = verdict_lines(summary) if summary.get("outcome") != "finished" else None
        if found is not None:
            self._console.print(found, soft_wrap=True)

    def close(self) -> None:
        """Give the terminal back, also where the run failed."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        """Return the panel in its present state."""
        number, total = self._position()
        width = max(20, min(self._console.width, 110) - 4)
        rows = [self._progress(number, total), Text(), self._numbers(width)]
        phases = {name: _number(self._last, f"time/{name}") or 0.0 for name in PHASES}
        if sum(phases.values()) > 0:
            rows += [Text(), *_phase_rows(phases, width)]
        title = f"[bold]{_escaped(self._info.get('run_name') or 'rft-train')}[/bold]"
        directory = self._info.get("run_directory")
        subtitle = f"[dim]{_escaped(_tail(str(directory), width - 2))}[/dim]" if directory else None
        return Panel(Group(*rows), title=title, subtitle=subtitle, width=width + 4, padding=(1, 1), border_style="cyan")

    def _position(self) -> tuple[int, int]:
        number = int(_number(self._last, "step") or 0)
        total = int(_number(self._last, "num_steps") or _number(self._info, "num_steps") or 0)
        return number, total

    def _progress(self, number: int, total: int) -> RenderableType:
        row = Table.grid(expand=True, padding=(0, 2))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        label = Text.assemble(("step ", "dim"), (f"{number}", "bold"), (f" / {total}" if total else "", "dim"))
        left = duration(_number(self._last, "time/left"))
        time = (
            Text.assemble((left, "bold"), (" left", "dim"))
            if left and number < total
            else Text(_elapsed(self._last), "dim")
        )
        row.add_row(label, ProgressBar(total=total or None, completed=number, complete_style="cyan"), time)
        return row

    def _numbers(self, width: int) -> RenderableType:
        measure = self._training.measure
        first, held_out, details = amount(_number(self._last, measure.name)), self._held_out_score(), self._details()
        values = [first, held_out, *(value for _, value, _ in details)]
        names = [measure.label, "held-out", *(name for name, _, _ in details)]
        table = Table.grid(padding=(0, 2))
        # names and values are never cut: on a narrow terminal what is beside them goes on below
        for column in (names, values):
            table.add_column(no_wrap=True, min_width=max(map(len, column)))
        table.add_column()
        rest = max(8, width - sum(max(map(len, column)) + 2 for column in (names, values)))
        curve = Text(
            sparkline(self._scores, min(rest, max(8, width - 34))), "yellow" if measure.less_is_better else "green"
        )
        table.add_row(Text(measure.label, "dim"), Text(first, "bold"), curve)
        table.add_row(Text("held-out", "dim"), Text(held_out, "bold"), self._held_out_gain(rest))
        for name, value, parts in details:
            table.add_row(Text(name, "dim"), Text(value, "bold"), Text(wrapped(parts, rest), "dim"))
        return table

    def _held_out_score(self) -> str:
        return _score(self._held_out_scores[-1][1], self._training.held_out) if self._held_out_scores else "-"

    def _held_out_gain(self, width: int) -> Text:
        """Return the change since the first evaluation, and its curve where that fits beside it."""
        if not self._held_out_scores:
            return Text("not scored yet", "dim")
        measure = self._training.held_out
        (first_step, first), (last_step, last) = self._held_out_scores[0], self._held_out_scores[-1]
        if len(self._held_out_scores) == 1:
            return Text(f"at step {last_step}", "dim")
        gain = first - last if measure.less_is_better else last - first
        style = "green" if gain > 0 else "red" if gain < 0 else "dim"
        apart = f"{100 * (last - first):+.1f} points" if measure.is_share else f"{last - first:+.4f}"
        change = f"{apart} since step {first_step}"
        curve = sparkline([value for _, value in self._held_out_scores], 20)
        beside = [("  ", ""), (curve, "cyan")] if len(change) + 2 + len(curve) <= width else []
        return Text.assemble((change, style), *beside)

    def _details(self) -> list[tuple[str, str, list[str]]]:
        """Return (name, value, what is beside it) of the rows below reward and held-out score."""
        record = self._last
        tokens = _number(record, "time/tokens_per_second")
        samples = _number(record, "time/samples_per_minute")
        length = _number(record, "completion/length_mean")
        cut = _number(record, "completion/truncated_share")
        rows = [("speed", f"{amount(tokens, 0)} tok/s" if tokens is not None else "-", [_per_minute(samples)])]
        if length is not None:
            share = [] if cut is None else [f"{cut:.0%} cut off at the limit"]
            rows.append(("response", f"{length:.0f} tok", share))
        for model in ("policy", "critic"):
            shown = [each for each in self._training.line if each.name.startswith(f"{model}/")]
            numbers = [(each.label, _number(record, each.name)) for each in shown]
            if parts := [f"{label} {amount(number)}" for label, number in numbers if number is not None]:
                rows.append((model, "", parts))
        if unscored := _unscored(record):
            rows.append(("unscored", "", [unscored]))
        return rows


def _working(record: Record) -> list[str]:
    """Return how much of the device is used, and the share of a step in which it waits for data."""
    mfu, rate, wait = (_number(record, f"time/{name}") for name in ("mfu", "model_tflops", "share_data"))
    words = [] if rate is None else [f"TFLOP/s={rate:.3g}"] if mfu is None else [f"MFU={mfu:.1%}"]
    # without rates there is no training on rows, whose data could be waited for
    return words if rate is None or wait is None else [*words, f"wait={wait:.0%}"]


def plain_line(record: Record, training: TrainingRecord) -> str:
    """One step on one line, for files and pipes."""
    number, total = int(_number(record, "step") or 0), int(_number(record, "num_steps") or 0)
    parts = [f"step {number:>{len(str(total))}}/{total}" if total else f"step {number}"]
    speed = (Measure(name=name, label=label, digits=0) for label, name in _SPEED.items())
    for measure in (training.measure, *training.line, *speed):
        value = _number(record, measure.name)
        if value is not None:
            parts.append(f"{measure.label}={_plain(value, measure.digits)}")
    parts += _working(record)
    if unscored := _unscored(record):
        parts.append(f"unscored={unscored}")
    seconds = [
        f"{name} {_number(record, f'time/{name}') or 0:.1f}" for name in PHASES if _number(record, f"time/{name}")
    ]
    step_seconds = _number(record, "time/step")
    if step_seconds is not None:
        parts.append(f"seconds={step_seconds:.2f}" + (f" ({', '.join(seconds)})" if seconds else ""))
    left = duration(_number(record, "time/left"))
    return "  ".join([*parts, f"left={left}"] if left else parts)


def _unscored(record: Record) -> str:
    """Share of responses without a reward, and their number by kind of failure; empty where all have one."""
    share = _number(record, "reward/unscored")
    if not share:
        return ""
    kinds = {key.removeprefix(UNSCORED_KIND): _number(record, key) for key in record if key.startswith(UNSCORED_KIND)}
    return f"{_plain(share, 3)} ({', '.join(f'{kind} {count:.0f}' for kind, count in kinds.items() if count)})"


def _plain(value: float, digits: int) -> str:
    """A number that programs read too: no separators. What rounding alone leaves is 0."""
    value = 0.0 if abs(value) < _ROUNDING else value
    return f"{value:.{digits}f}" if value == 0 or abs(value) >= 10**-digits else f"{value:.1e}"


def outcome_line(summary: Record, held_out: Measure) -> str:
    """Return the outcome of the run on one line, with the `held_out` number before and after it."""
    parts = [str(summary.get("outcome", "finished"))]
    steps, seconds = _number(summary, "steps"), _number(summary, "seconds")
    if steps is not None:
        parts.append(f"{steps:.0f} steps")
    if seconds is not None:
        parts.append(duration(seconds))
    scores = as_object(summary.get("eval"))
    before, after = (_counted(as_object(scores.get(when)), held_out) for when in ("before", "after"))
    if before and after:
        parts.append(f"held-out {held_out.name} {before} -> {after}")
    return "done   " + ", ".join(parts)


def _counted(entry: Record, measure: Measure) -> str:
    value = _number(entry, measure.name)
    if value is None:
        return ""
    count = f" (n={entry['n']})" if is_number(entry.get("n")) else ""
    return f"{_score(value, measure)}{count}"


def _score(value: float, measure: Measure) -> str:
    return f"{value:.1%}" if measure.is_share else f"{value:.4f}"


def _phase_rows(seconds: Mapping[str, float], width: int) -> list[RenderableType]:
    """A bar of the parts of a step, and under it their names and shares."""
    total = sum(seconds.values())
    cells = shares(seconds, width)
    bar = Text()
    for name, count in cells.items():
        bar.append("\u2588" * count, PHASES[name])
    # a share that would read 0 % is not named
    named = [f"\u25a0 {name} {seconds[name] / total:.0%}" for name in cells if seconds[name] >= 0.005 * total]
    legend = Text(wrapped(named, width), "dim")
    for name in cells:
        legend.highlight_regex(rf"\u25a0(?= {name} )", PHASES[name])
    return [bar, legend]


def _tail(path: str, width: int) -> str:
    """The end of a path, which names the run, where all of it does not fit."""
    return path if len(path) <= width else "\u2026" + path[1 - width :]


def _per_minute(samples: float | None) -> str:
    return f"{amount(samples, 0)} samples/min" if samples is not None else ""


def _elapsed(record: Record) -> str:
    elapsed = duration(_number(record, "time/elapsed"))
    return f"{elapsed} in all" if elapsed else ""


def _number(record: Record, name: str) -> float | None:
    """Return the finite number of this name; None where there is none."""
    value = record.get(name)
    return float(value) if is_number(value) else None


def _brief(value: object) -> str:
    return amount(value) if isinstance(value, float) else str(value)


def _escaped(value: object) -> str:
    return str(value).replace("[", "\\[")


class PanelSink:
    """The live panel as a sink."""

    def __init__(self, panel: LivePanel, num_steps: int) -> None:
        self._panel = panel
        self._num_steps = num_steps

    def start(self, info: RunInfo) -> None:
        """Draw the panel at the start of a run."""
        shown: dict[str, object] = {
            "run_name": info.name,
            "run_directory": str(info.directory),
            "num_steps": self._num_steps,
        }
        if info.resumed_from_step is not None:
            shown["resumed_from_step"] = info.resumed_from_step
        self._panel.start(shown)

    def step(self, record: Mapping[str, Any]) -> None:
        """Redraw the panel after a step."""
        self._panel.step(record)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: the panel draws numbers."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Redraw the panel after an evaluation."""
        self._panel.evaluation(record)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Draw the panel a last time and leave it on the terminal."""
        self._panel.finish(summary)
