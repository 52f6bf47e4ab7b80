"""Reader of run directories in any state: finished, running, or cut off in the middle of a line."""

from __future__ import annotations

import json
import math
import re
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard, cast

from rft_core.checkpoint_places import step_directories
from rft_trainer.runs.directory import is_held
from rft_trainer.runs.names import LATEST

STALE_SECONDS = 600.0
UNSCORED_KIND = "reward/unscored_"
"""Prefix of the metrics that count responses without a reward by kind of failure."""
SAMPLES_PAGE = "samples.html"
"""Sampled answers beside the images that they are about, where there are any."""
_COMMAND = re.compile(r"^  command: (\S+)$", re.M)
_CHANGED = re.compile(r"^(\w+): (.*?)\s+# (?!default)(.*)$")
_SETTING = re.compile(r"^(\w+): (.*\S) +# [^#\n]+$", re.M)
_LONGEST_SETTING = 10_000
"""Characters."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Contents of the files of one run."""

    path: Path
    summary: dict[str, Any]
    """summary.json; empty while the run has not ended."""
    metrics: list[dict[str, Any]]
    """Every whole row of metrics.jsonl."""
    evaluations: list[dict[str, Any]]
    command: str
    verb: str
    """The command of `rft-train` that made the run, as config.yaml has it; empty where it has none."""
    settings: dict[str, tuple[str, str]]
    """Settings that are not defaults: name -> (value, origin)."""
    checkpoints: list[str]
    rollout_files: list[Path]
    touched: float
    """When the run last wrote, in seconds since 1970."""
    live: bool | None
    """Whether a process holds the run's lock; None where that cannot be seen, since another machine writes the run."""
    damage: tuple[str, ...] = ()
    """Lines of its files that are no records, and were passed over."""

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.path.resolve().name

    @property
    def outcome(self) -> str:
        """Return "running", the outcome in the summary, or "stopped": killed, since it wrote none."""
        if self.live:
            return "running"  # whatever an earlier part of the run wrote at its end
        if self.summary:
            return str(self.summary.get("outcome", "finished"))
        # of a run on another machine silence is the only sign
        writes = self.live is None and time.time() - self.touched < STALE_SECONDS
        return "running" if writes else "stopped"

    @property
    def step(self) -> int:
        """The last step that was logged."""
        steps = self.series("step")
        return int(steps[-1]) if steps else 0

    def series(self, name: str) -> list[float]:
        """Return the values of one metric over the steps that have it."""
        return [float(row[name]) for row in self.metrics if is_number(row.get(name))]

    def accuracy(self, when: str) -> float | None:
        """Return the held-out accuracy `before` or `after`, from the summary or else from evals.jsonl."""
        return self.measured("accuracy", when)

    def measured(self, name: str, when: str) -> float | None:
        """Return a number of the evaluation `before` or `after`, from the summary or else from evals.jsonl."""
        number = as_object(as_object(self.summary.get("eval")).get(when)).get(name)
        if is_number(number):
            return float(number)
        rows = [row for row in self.evaluations if is_number(row.get(f"eval/{name}"))]
        if not rows or (when == "after" and len(rows) < 2):
            return None
        return float(rows[0 if when == "before" else -1][f"eval/{name}"])

    @property
    def seconds(self) -> float | None:
        """Seconds that the run took, or has taken so far."""
        if is_number(self.summary.get("seconds")):
            return float(self.summary["seconds"])
        if self.metrics and is_number(self.metrics[-1].get("time/elapsed")):
            return float(self.metrics[-1]["time/elapsed"])
        return sum(self.series("time/step")) or None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    # a whole number beyond all floats is none either, and `isfinite` cannot take it
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def as_object(value: object) -> dict[str, Any]:
    """Return a JSON object as it is, and an empty one for any other value."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def is_run(path: Path) -> bool:
    """Return whether a path is a run directory."""
    return path.is_dir() and any((path / name).is_file() for name in ("config.yaml", "metrics.jsonl", "summary.json"))


def read_run(path: Path) -> RunFiles:
    """Read all files of one run that the pages show; missing and damaged files are empty."""
    metrics, evaluations = _table(path / "metrics.jsonl"), _table(path / "evals.jsonl")
    damage = (*metrics[1], *evaluations[1])
    return replace(read_head(path), metrics=metrics[0], evaluations=evaluations[0], damage=damage)


def read_head(path: Path) -> RunFiles:
    """Read the short files of one run: all but the rows of its steps and evaluations."""
    checkpoints = path / "checkpoints"
    config = read_text(path / "config.yaml")
    verb = _COMMAND.search(config)
    return RunFiles(
        path=path,
        summary=_object(path / "summary.json"),
        metrics=[],
        evaluations=[],
        command=read_text(path / "command.txt").strip(),
        verb=verb[1] if verb else "",
        settings=_changed_settings(config),
        # the manifest is written last, so a folder without one is no checkpoint yet
        checkpoints=[path.name for path in step_directories(checkpoints) if (path / "manifest.json").is_file()],
        rollout_files=sorted((path / "rollouts").glob("step_*.jsonl")),
        touched=_touched(path),
        live=_is_live(path),
    )


def read_runs(directory: Path) -> list[RunFiles]:
    """Read every run in a directory, the newest first; one that cannot be read is there with the reason alone."""
    found: list[RunFiles] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name == LATEST and path.is_symlink():
            continue  # it is in the table under its own name
        try:
            found += [read_run(path)] if is_run(path) else []
        except OSError as error:  # of another user, or removed just now
            damage = (f"cannot be read: {error.strerror}",)
            outcome = {"outcome": "unreadable"}
            found.append(RunFiles(path, outcome, [], [], "", "", {}, [], [], 0.0, live=False, damage=damage))
    return sorted(found, key=lambda run: run.touched, reverse=True)


def rows(path: Path) -> list[dict[str, Any]]:
    """Read the complete rows of a JSON lines file; a line cut off by a kill is left out."""
    # at line feeds alone: a text of a model may hold another line separator, such as U+2028
    return [row for line in read_text(path).split("\n") if (row := parse_record(line))]


def _table(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a file with a row a step, and what is to be said of its lines that are none."""
    lines = read_text(path).split("\n")
    records = [parse_record(line) for line in lines]
    # behind the last line feed: cut off by a kill, or being written just now
    bad = [number for number, row in enumerate(records[:-1], start=1) if not is_number(row.get("step"))]
    shown = f"{path.name}: {len(bad)} of {len(lines) - 1} lines are no records of a step, the first is line"
    return [row for row in records if row], [f"{shown} {bad[0]}"] if bad else []


def parse_record(line: str) -> dict[str, Any]:
    """Return the JSON object on a line; empty where there is none: cut off, too deep or a number of too many digits."""
    try:
        return as_object(json.loads(line))
    except (ValueError, RecursionError):
        return {}


def last_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last `count` complete rows."""
    return rows(path)[-count:]


def _object(path: Path) -> dict[str, Any]:
    try:
        return as_object(json.loads(read_text(path) or "{}"))
    except (ValueError, RecursionError):
        return {}


def read_text(path: Path) -> str:
    """Return the text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_live(path: Path) -> bool | None:
    if is_held(path):
        return True
    # a lock on a shared disk may be seen on the machine alone that took it
    return False if _object(path / "env.json").get("host") == socket.gethostname() else None


def _touched(path: Path) -> float:
    times = [
        p.stat().st_mtime
        for p in (path / "metrics.jsonl", path / "summary.json", path / "config.yaml", path)
        if p.exists()
    ]
    return max(times, default=0.0)


def _changed_settings(config: str) -> dict[str, tuple[str, str]]:
    # a longer line is no setting, and a search for its comment takes the square of its length
    matches = (_CHANGED.match(line) for line in config.splitlines() if len(line) <= _LONGEST_SETTING)
    return {match[1]: (match[2], match[3]) for match in matches if match}


def all_settings(config: str) -> dict[str, str]:
    """Return every setting of the text of config.yaml by its name, the defaults too."""
    return {match[1]: match[2] for match in _SETTING.finditer(config)}
