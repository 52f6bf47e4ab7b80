"""Facts of one run that its page shows beside the curves: outcome, findings, times, settings, files."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from math import fsum
from pathlib import Path
from typing import Any

from rft.dashboard.growing_rows import last_rows
from rft.dashboard.run_entries import as_integer, state_of
from rft.report import sections
from rft.report.page import measures_of
from rft_core.secrets import scrub_text
from rft_trainer.runs.reader import RunFiles, as_object, is_number, read_run
from rft_trainer.runs.verdict import evidence_of, verdict

_REST = 20.0
"""Times as long as the facts took to compute, until they are computed again."""
_LEAST_REST = 2.0
_MOST_KEPT = 64
_MOST_BYTES = 256 << 10
_MOST_ALARMS = 50


class FactStore:
    """Facts of runs, computed again when their files have changed and the last computation is some time ago."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, tuple[float, dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def facts(self, run: Path) -> dict[str, Any]:
        """Return the facts of a run, at most some seconds old; see `run_facts`."""
        with self._lock:
            due, found = self._kept.get(run, (0.0, {}))
            began = time.monotonic()
            if began >= due:
                found = run_facts(run)
                ended = time.monotonic()
                self._kept[run] = (ended + max(_LEAST_REST, _REST * (ended - began)), found)
            self._kept.move_to_end(run)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return found


def run_facts(path: Path) -> dict[str, Any]:
    """Return what is known of a run, as plain JSON; secrets of its command and its settings are hidden."""
    run = read_run(path)
    main, less_is_better, curves = measures_of(run)
    state, why = state_of(run)
    last = run.metrics[-1] if run.metrics else as_object(None)
    return {
        "name": run.name,
        "verb": run.verb,
        "state": state,
        "why": why,
        "sentence": sections.sentence(run, main, less_is_better=less_is_better),
        "step": run.step,
        "num_steps": as_integer(last.get("num_steps")),
        "seconds": run.seconds,
        "left": last.get("time/left") if state == "running" and is_number(last.get("time/left")) else None,
        "touched": run.touched,
        "measure": main,
        "value": next(iter(run.series(main)[-1:]), None),
        "curves": curves,
        "findings": [finding.as_record() for finding in verdict(evidence_of(run))],
        "alarms": _alarms(path),
        "damage": list(run.damage),
        "speed": as_object(run.summary.get("speed")),
        "phases": _phases(run),
        "left_out": sections.drop_counts(run),
        "evaluations": _evaluations(run),
        "settings": [[name, scrub_text(value), origin] for name, (value, origin) in run.settings.items()],
        "command": scrub_text(run.command),
        "path": str(path),
        "checkpoints": run.checkpoints,
        "rollout_steps": [step for file in run.rollout_files if (step := step_of(file)) is not None],
    }


def step_of(file: Path) -> int | None:
    """Return the step in the name of a file of rollouts; None where it has none."""
    number = file.stem.removeprefix("step_")
    return int(number) if number.isdecimal() else None


def _phases(run: RunFiles) -> list[list[Any]]:
    """Return [number of its colour, name, seconds, share] of each phase, the longest first."""
    seconds = sections.phase_seconds(run)
    total = fsum(seconds.values())
    return [
        [sections.PHASES.index(name), name, value, value / total]
        for name, value in sorted(seconds.items(), key=lambda pair: -pair[1])
    ]


def _evaluations(run: RunFiles) -> list[list[Any]]:
    """Return [name, before, after] of each held-out number, also of a run that has not ended."""
    found = as_object(run.summary.get("eval"))
    before, after = as_object(found.get("before")), as_object(found.get("after"))
    if not after and run.evaluations:
        before, after = (_held_out(row) for row in (run.evaluations[0], run.evaluations[-1]))
    return [
        [name, before.get(name) if is_number(before.get(name)) else None, value]
        for name, value in after.items()
        if is_number(value)
    ]


def _held_out(row: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}


def _alarms(path: Path) -> list[list[Any]]:
    """Return [step, text] of what the guard of the optimizer steps found, the newest first."""
    rows = last_rows(path / "numerics.jsonl", _MOST_BYTES)[-_MOST_ALARMS:]
    return [[as_integer(row.get("step")), _text(row)] for row in reversed(rows)]


def _text(row: dict[str, Any]) -> str:
    if isinstance(row.get("what"), str):
        return str(row["what"])
    return ", ".join(f"{name} {value}" for name, value in row.items() if name != "step")
