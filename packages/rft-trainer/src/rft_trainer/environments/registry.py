"""Environments by name, or from a file of the user's own; no torch is imported until one is made."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from rft_core.errors import OptionsError

if TYPE_CHECKING:
    from rft_trainer.environments.episodes import EpisodeRunner

_CLASSES = {
    "calculator": "rft_trainer.environments.calculator:Calculator",
    "calculator-noise": "rft_trainer.environments.noise_controls:NoisyCalculator",
    "guess-number": "rft_trainer.environments.guess_number:GuessNumber",
    "guess-number-noise": "rft_trainer.environments.noise_controls:NoisyHints",
}
"""The class of each name, imported when it is asked for: a wrong word is refused without torch."""

NAMES = tuple(_CLASSES)
"""Environments of this package."""

WHAT_THERE_IS = f"an environment is one of {', '.join(NAMES)}, or a class of your own as file.py:Class"


def environment_names() -> tuple[str, ...]:
    """The environments that need no file."""
    return NAMES


def environment_by_name(
    name: str, *, num_workers: int = 1, tool_timeout: float = 10.0, rollout_timeout: float = 60.0
) -> EpisodeRunner:
    """The environment called `name`, or the class of a file given as `path/to/file.py:Class`.

    Args:
        name: one of `environment_names()`, or file.py:Class (the last colon separates the two).
        num_workers, tool_timeout, rollout_timeout: as for `UserEpisodes`; our own run in this process.

    Raises:
        OptionsError: no such name, file or class, or a class that cannot be used.
        DataError: the file raises while it is imported.
    """
    from rft_trainer.environments.episodes import BuiltinEpisodes
    from rft_trainer.environments.user_environment import UserEpisodes

    if name in _CLASSES:
        module, _, found = _CLASSES[name].partition(":")
        return BuiltinEpisodes(getattr(importlib.import_module(module), found))
    if has_processes(name):
        path, _, found = name.rpartition(":")
        return UserEpisodes(
            path, found, num_workers=num_workers, tool_timeout=tool_timeout, rollout_timeout=rollout_timeout
        )
    raise OptionsError(
        code="environment.unknown",
        what=f"environment {name!r}; there are {', '.join(NAMES)}, and file.py:Class",
        where="--environment",
        why=WHAT_THERE_IS,
        state="nothing was started",
        do=f"--environment {nearest_name(name)}",
    )


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
