"""Several runs beside one another: the settings in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rft_core.secrets import scrub_text
from rft_trainer.runs.reader import all_settings, read_head, read_text

MOST_COMPARED = 8
"""Runs that have a colour each."""


def setting_differences(runs: Sequence[Path]) -> list[list[Any]]:
    """Return [name, value of each run] of the settings whose values differ; None where a run lacks the setting.

    A setting that each run was given for its own sake, such as where it is saved, is among them.
    """
    found = [all_settings(read_text(run / "config.yaml")) for run in runs]
    names = dict.fromkeys(name for settings in found for name in settings)
    rows = [[name, *(settings.get(name) for settings in found)] for name in names]
    return [
        [name, *(value if value is None else scrub_text(value) for value in values)]
        for name, *values in rows
        if len(set(values)) > 1
    ]


def compared(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return name, command and outcome of each run."""
    heads = [read_head(run) for run in runs]
    return [{"name": head.name, "verb": head.verb, "outcome": head.outcome} for head in heads]
