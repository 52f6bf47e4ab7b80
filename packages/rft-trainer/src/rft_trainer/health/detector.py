"""Detectors: a rule over rows, with everything that its page says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rft_trainer.health.rules import Rule

Level = Literal["warning", "alarm"]
"""A warning is worth a look; an alarm is a run that will not come to anything as it is, which `--on_alarm` acts on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """One thing that can be wrong, and how the rows show it."""

    name: str
    metrics: str
    """Names of the metrics that it reads, with a space between them; a run without them hears nothing of it."""
    window: int
    """Steps of which it must hold."""
    threshold: float
    level: Level
    rule: Rule
    when: str
    """The rule in words."""
    says: str = "{detail}"
    """The sentence, with `value`, `detail`, `window` and `threshold`."""
    setting: str
    """The setting that is most related."""
    do: str = ""
    """What to change or to look at, where the rule computes none."""
