"""What `--environment` may be; no torch is imported here, so that a wrong word is told at once."""

from __future__ import annotations

import difflib

NAMES = ("calculator", "calculator-noise", "guess-number", "guess-number-noise")
"""Environments of this package; `registry` has their classes."""

WHAT_THERE_IS = f"an environment is one of {', '.join(NAMES)}, or a class of your own as file.py:Class"


def has_processes(name: str) -> bool:
    """Whether it is a class of a person's file, as file.py:Class; it runs in processes that can be killed."""
    path, colon, found = name.rpartition(":")
    return bool(colon and path and found)


def is_known(name: str) -> bool:
    """Whether it is written as an environment is."""
    return name in NAMES or has_processes(name)


def nearest_name(name: str) -> str:
    """What was probably meant."""
    if name.endswith(".py"):
        return f"{name}:Environment"
    return next(iter(difflib.get_close_matches(name, NAMES, n=1)), NAMES[0])
