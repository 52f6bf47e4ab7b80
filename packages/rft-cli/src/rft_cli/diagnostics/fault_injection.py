"""Failures on purpose, for tests of the real program: RFT_FAULT="point[:nth[:action]]", several by commas.

At the nth time (from 1) that a fault point is passed, `exit` ends the process at once with status 86,
`kill` sends it SIGKILL, and `raise` raises `InjectedFault`. Without the variable nothing is installed.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from rft_core import fault_points
from rft_core.errors import OptionsError

VARIABLE = "RFT_FAULT"
EXIT_STATUS = 86
ACTIONS = ("exit", "kill", "raise")


class InjectedFault(RuntimeError):
    """Error that the action `raise` raises."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure: at which pass of which point, and how."""

    point: str
    nth: int
    action: str


def parse(text: str) -> list[Fault]:
    """The faults of a value of RFT_FAULT.

    Raises:
        OptionsError: it does not have the form point[:nth[:action]].
    """
    faults: list[Fault] = []
    for part in text.split(","):
        point, _, rest = part.strip().partition(":")
        nth, _, action = rest.partition(":")
        if not point or (nth and (not nth.isdecimal() or int(nth) < 1)) or (action or "exit") not in ACTIONS:
            raise OptionsError(
                code="option.fault",
                what=f"{VARIABLE} = {text!r} does not say when and how to fail",
                where=f"environment: {VARIABLE}",
                why=f"the form is point[:nth[:action]], with an action of {', '.join(ACTIONS)}",
                do=f"unset {VARIABLE}",
            )
        faults.append(Fault(point, int(nth or 1), action or "exit"))
    return faults


def install_from(environment: Mapping[str, str]) -> None:
    """Install the hook that the environment asks for, if it does."""
    text = environment.get(VARIABLE, "")
    if not text:
        return
    faults, passed = parse(text), Counter[str]()

    def hook(point: str) -> None:
        passed[point] += 1
        for fault in faults:
            if fault.point == point and fault.nth == passed[point]:
                _fail(fault)

    fault_points.install(hook)


def _fail(fault: Fault) -> NoReturn:
    if fault.action == "raise":
        raise InjectedFault(f"{fault.point}, pass {fault.nth}")
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    # as a crash ends it: no handler runs, and no buffer is flushed
    os._exit(EXIT_STATUS)
