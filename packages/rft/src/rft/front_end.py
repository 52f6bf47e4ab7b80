"""Front end of a run: the library calls a `FrontEnd` at four moments, and prints nothing itself.

Notices that belong to no moment go to `logging`, under the name of the module that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft.resolved import Resolved
from rft_core.errors import RftError

if TYPE_CHECKING:
    from rft.process.machine import Machine
    from rft_trainer.metrics.sink import Sink
    from rft_trainer.settings.run import RunSettings


def _show_no_plan(resolved: Resolved[Any], data: Any, machine: Machine) -> None:
    """Show nothing before the run begins."""


def _no_sinks(run: RunSettings, num_steps: int) -> Sequence[Sink]:
    """Add nothing to the metrics of the run directory."""
    return ()


def _ignore_directory(path: Path) -> None:
    """Take no note of the run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """Callables of a front end; the default shows nothing, as a script wants it.

    All are called by the first rank only, except `run_chosen` and `show_error`.
    """

    show_plan: Callable[[Resolved[Any], Any, Machine], None] = _show_no_plan
    """Called with the settings, the data (`RlData` or `SftData`) and the machine, before anything is written."""
    make_sinks: Callable[[RunSettings, int], Sequence[Sink]] = _no_sinks
    """Sinks beside those of the settings, from the number of steps: a live panel, for example."""
    run_chosen: Callable[[Path], None] = _ignore_directory
    """Called by every rank with the directory of the run, before anything is written."""
    run_begins: Callable[[Path], None] = _ignore_directory
    """Called once the run directory exists."""
    show_error: Callable[[RftError], None] | None = None
    """Shows the error of a process that is ended from outside of its main thread; None: one line on stderr."""


SILENT = FrontEnd()
"""Shows nothing."""
