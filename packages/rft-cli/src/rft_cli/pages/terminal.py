"""The terminal as a front end: plan page, live panel, error page."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from rft.config.command_record import TrainingRecord
from rft.front_end import FrontEnd
from rft.process.machine import Machine
from rft.resolved import Resolved
from rft_cli.diagnostics import bundle, problems
from rft_cli.diagnostics.notices import show_notices
from rft_cli.pages import run_plan
from rft_cli.pages.live_panel import LivePanel, PanelSink
from rft_cli.records.discovery import training_of
from rft_core.errors import RftError
from rft_trainer.settings.run import RunSettings


def terminal(training: TrainingRecord) -> FrontEnd:
    """Return the pages and the live panel of a training command, which this is the record of."""
    show_notices()
    return FrontEnd(
        show_plan=_show_plan,
        make_sinks=partial(_make_sinks, training),
        run_begins=bundle.remember_run_directory,
        show_error=_show_error,
    )


def _show_plan(resolved: Resolved[Any], data: Any, machine: Machine) -> None:
    run_plan.show(training_of(resolved.command), resolved, data, machine)


def _make_sinks(training: TrainingRecord, run: RunSettings, num_steps: int) -> list[PanelSink]:
    return [PanelSink(LivePanel(training, log_interval=run.log_interval), num_steps)]


def _show_error(error: RftError) -> None:
    problems.show(error, as_json=problems.wants_json(list(sys.argv)))
