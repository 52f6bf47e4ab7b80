"""A fact of a machine or an installation, with its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class MachineFact:
    """One fact of the machine, and whether it stands in the way of a run."""

    subject: str
    """Its name, such as `torch` or `disk /data`."""
    value: str
    verdict: Verdict = "ok"
    why: str = ""
    """Why it is noted or a problem."""
    do: str = ""
    """The one command or change that mends it; empty where nothing has to be done."""
