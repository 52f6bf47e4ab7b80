"""Sink that records some steps of a run with torch's profiler, and writes trace and summary.

The steps are those of `--profile`, and those that `rft-train runs profile` asks for while the run goes on.

Only the first rank has sinks, so its steps alone are recorded: on the others nothing is slower but by waiting for it.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler

from rft_core.durable_files import replace_record, replace_text, storage_errors
from rft_trainer.metrics.sink import RunInfo
from rft_trainer.sinks.profile.asked import FOLDER, asked_steps, forget_request
from rft_trainer.sinks.profile.host_reads import ReadCounter, read_counter
from rft_trainer.sinks.profile.steps import ProfiledSteps
from rft_trainer.sinks.profile.summary import Profiled, page_of, record_of
from rft_trainer.sinks.profile.trace import sums_of

_LOG = logging.getLogger(__name__)
_SILENT = "99"
_KEPT_ROWS = 100
"""Rows before a profile with which its steps are compared."""
TRACE, SUMMARY, PAGE = "rank_0.trace.json.gz", "summary.json", "summary.md"


class ProfileSink:
    """Sink that records from the end of the step before the first one to the end of the last one."""

    def __init__(
        self,
        steps: ProfiledSteps | None,
        *,
        command: str,
        device: str,
        world_size: int,
        why_unread: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Record these steps.

        Args:
            steps: of the run, whenever it began; None = those alone that somebody asks for later.
            command: that made the run.
            device: of this rank.
            world_size: number of ranks.
            why_unread: why reads of the host are not counted; empty = they are.
            clock: gives seconds.
        """
        self._planned, self._command, self._device, self._world_size = steps, command, device, world_size
        self._steps = steps
        """Those that are recorded next, or now."""
        self._why_unread = why_unread
        self._clock = clock
        self._run = Path()
        self._profiler: profiler.profile | None = None
        self._reads: ReadCounter | None = None
        self._starting = 0.0
        self._before: deque[Mapping[str, Any]] = deque(maxlen=_KEPT_ROWS)
        self._rows: list[Mapping[str, Any]] = []
        self._last = 0

    def start(self, info: RunInfo) -> None:
        """Begin at once where the first step is recorded."""
        self._run = info.directory
        self._last = info.resumed_from_step or 0
        forget_request(self._run)  # of a process that has ended
        if self._steps and self._last >= self._steps.first and not (self._run / FOLDER).exists():
            _LOG.warning(
                "nothing is profiled: the run goes on behind step %d, and %s would be\n        do  --profile %d-%d",
                self._last,
                self._steps,
                self._last + 1,
                self._last + self._steps.number,
            )
        self._begin_where_due()

    def step(self, record: Mapping[str, Any]) -> None:
        """Keep the row of a step, and begin or end behind it."""
        self._last = int(record["step"])
        if self._profiler is None:
            # the first step makes what later ones take
            self._before += [record] if self._last > 1 else []
        else:
            self._rows.append(self._without_start(record))
            if self._steps is None or self._last >= self._steps.last:
                self._end()
        if self._profiler is None:
            planned = self._planned if self._planned and self._last < self._planned.first else None
            self._steps = asked_steps(self._run, self._last, planned) or planned
            self._begin_where_due()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: a profile has times alone."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Do nothing: an evaluation is part of the step after it."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write what was recorded of a run that ended before the last step; say so where nothing was."""
        if self._profiler is not None and self._rows:
            self._end()
        elif self._profiler is not None:
            self._discard()
        elif forget_request(self._run):
            _LOG.warning("the profile that was asked for was not begun: the run ended with step %d", self._last)
        elif self._planned and self._last < self._planned.first and summary.get("outcome") == "finished":
            _LOG.warning(
                "nothing was profiled: the run ended with step %d, before %s\n        do  --profile %d",
                self._last,
                self._planned,
                max(self._last, 1),
            )

    def _begin_where_due(self) -> None:
        if self._steps is None or self._last != self._steps.first - 1:
            return
        started = self._clock()
        self._rows, self._reads = [], None
        # its library writes errors to the terminal on machines without a GPU
        os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
        # not torch.profiler.profile, whose start imports the compiler, for 20 seconds
        use_device = "cuda" if self._device.startswith("cuda") else None
        self._profiler = profiler.profile(use_device=use_device, use_kineto=True)
        self._profiler.__enter__()
        if not self._why_unread:
            self._reads = read_counter(self._device)
            self._reads.open()
        self._starting = self._clock() - started

    def _without_start(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row of a step without the seconds in which the profiler itself began."""
        spent, self._starting = self._starting, 0.0
        # before the first step of a run they belong to no row
        if not spent or self._last == 1:
            return record
        less = {name: max(record[name] - spent, 0.0) for name in ("time/step", "time/other") if name in record}
        return {**record, **less}

    def _stop(self) -> profiler.profile:
        recorded, self._profiler = self._profiler, None
        assert recorded is not None
        if self._reads is not None:
            self._reads.close()
        recorded.__exit__(None, None, None)
        return recorded

    def _discard(self) -> None:
        """Stop recording a run that failed within its first profiled step."""
        try:
            self._stop()
        except RuntimeError as error:
            # a device that has failed answers nothing, and its own error is the one to be told
            _LOG.warning("the profile was not ended: %s", error)

    def _end(self) -> None:
        folder = self._run / FOLDER / f"steps_{self._rows[0]['step']}-{self._rows[-1]['step']}"
        try:
            recorded = self._stop()
            with storage_errors("write", folder):
                folder.mkdir(parents=True, exist_ok=True)
                events = _write_trace(recorded, folder / TRACE)
        except RuntimeError as error:
            _LOG.warning("the profile was not written: %s", error)
            return
        record = record_of(self._profiled(events))
        replace_record(folder / SUMMARY, record)
        replace_text(folder / PAGE, page_of(record))
        bound = record["bound"]
        _LOG.info("profile of %s: %s%s", self._steps, folder / PAGE, f"; {bound['what']}" if bound else "")

    def _profiled(self, events: list[Any]) -> Profiled:
        first, last = int(self._rows[0]["step"]), int(self._rows[-1]["step"])
        return Profiled(
            run=self._run.name,
            command=self._command,
            device=_name_of(self._device),
            world_size=self._world_size,
            steps=ProfiledSteps(first, last),
            rows=self._rows,
            rows_before=list(self._before),
            sums=sums_of(events),
            reads=self._reads.places() if self._reads else [],
            how_read=self._reads.how if self._reads else "",
            why_unread=self._why_unread,
            trace=TRACE,
        )


def _write_trace(recorded: profiler.profile, path: Path) -> list[Any]:
    """Write the trace, compressed, and return its events."""
    plain = path.with_suffix("")
    try:
        recorded.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        return json.loads(plain.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    finally:
        plain.unlink(missing_ok=True)


def _name_of(device: str) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device
