"""The file of a report: where it goes, and the lines that say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rft.report.page import report
from rft.resolved import Resolved
from rft.settings import ReportSettings
from rft_core.durable_files import replace_text
from rft_trainer.runs.directory import not_a_run
from rft_trainer.runs.reader import is_run

REPORT = "report.html"
_KIB = 1 << 10


def lines(resolved: Resolved[ReportSettings]) -> Iterator[str]:
    """Write the report on a run, and yield where it is.

    Raises:
        CheckpointError: there is no run at that place.
        StorageError: the file cannot be written.
    """
    chosen = resolved.settings.report
    run = Path(chosen.run).expanduser()
    if not is_run(run):
        raise not_a_run(run)
    file = Path(chosen.output).expanduser() if chosen.output else run / REPORT
    replace_text(file, report(run))
    yield f"{file}: {file.stat().st_size / _KIB:,.0f} KiB, for a browser; it needs no network"
