"""A profile that is asked for while a run goes on: a file in the run's folder, taken at the end of a step.

No torch is imported here.
"""

from __future__ import annotations

import json
from pathlib import Path

from rft_core.durable_files import replace_record
from rft_trainer.sinks.profile.steps import MOST, ProfiledSteps

FOLDER = "profile"
REQUEST = "request.json"


def ask(run: Path, number: int) -> Path:
    """Ask the run in this folder to record its next steps, and return the file that says so.

    Args:
        run: directory of the run.
        number: steps to record, 1 to `MOST`.

    Raises:
        ValueError: another number.
        StorageError: the file cannot be written.
    """
    if not 1 <= number <= MOST:
        raise ValueError(f"a trace holds every operation of its steps: 1 to {MOST} of them, not {number}")
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    replace_record(folder / REQUEST, {"steps": number})
    return folder / REQUEST


def asked_steps(run: Path, last: int, planned: ProfiledSteps | None) -> ProfiledSteps | None:
    """Return the steps behind step `last` that somebody asks for, and take the request; None where there is none.

    A request waits where its steps would meet those that the run's settings ask for.
    """
    path = run / FOLDER / REQUEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        number = int(json.loads(text)["steps"])
    except (ValueError, KeyError, TypeError):
        number = 0
    steps = ProfiledSteps(last + 1, last + min(max(number, 0), MOST))
    if planned is not None and steps.first <= planned.last and steps.last >= planned.first:
        return None
    path.unlink(missing_ok=True)
    return steps if number > 0 else None


def forget_request(run: Path) -> bool:
    """Remove a request that nobody took; return whether there was one."""
    path = run / FOLDER / REQUEST
    there = path.exists()
    path.unlink(missing_ok=True)
    return there
