"""Registry of environments by name or from a user's file; torch is not imported until one is built."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rft_core.errors import SettingsRefusal
from rft_core.nearest_names import nearest_names

if TYPE_CHECKING:
    from rft_trainer.environments.episodes import EpisodeRunner
    from rft_trainer.workers.limits import ProcessLimits

_CLASSES = {
    "calculator": "rft_trainer.environments.calculator:Calculator",
    "calculator-noise": "rft_trainer.environments.noise_controls:NoisyCalculator",
    "guess-number": "rft_trainer.environments.guess_number:GuessNumber",
    "guess-number-noise": "rft_trainer.environments.noise_controls:NoisyHints",
}
"""The class of each name, imported when it is asked for: a wrong word is refused without torch."""

NAMES = tuple(_CLASSES)
"""Environments of this package."""


def environment_by_name(
    name: str,
    *,
    num_workers: int = 1,
    tool_timeout: float = 10.0,
    rollout_timeout: float = 60.0,
    limits: ProcessLimits | None = None,
) -> EpisodeRunner:
    """Build the runner of the environment `name`, or of a class given as `path/to/file.py:Class`.

    Args:
        name: one of `NAMES`, or file.py:Class (the last colon separates the two).
        num_workers, tool_timeout, rollout_timeout, limits: as for `UserEpisodes`; our own run in this process.

    Raises:
        OptionsError: no such name, file or class, or a class that cannot be used.
        DataError: the file raises while it is imported.
    """
    from rft_trainer.environments.episodes import BuiltinEpisodes
    from rft_trainer.environments.user_environment import UserEpisodes

    if name in _CLASSES:
        module, _, class_name = _CLASSES[name].partition(":")
        return BuiltinEpisodes(getattr(importlib.import_module(module), class_name))
    if has_processes(name):
        path, _, class_name = name.rpartition(":")
        return UserEpisodes(
            path,
            class_name,
            num_workers=num_workers,
            tool_timeout=tool_timeout,
            rollout_timeout=rollout_timeout,
            limits=limits,
        )
    raise unknown_environment(name).as_error({"environment": name})


def has_processes(name: str) -> bool:
    """Return whether `name` is a user's class, as file.py:Class, which runs in processes that can be killed."""
    path, colon, class_name = name.rpartition(":")
    return bool(colon and path and class_name)


def is_known(name: str) -> bool:
    """Return whether `name` is a built-in environment or has the form file.py:Class."""
    return name in NAMES or has_processes(name)


def unknown_environment(name: str) -> SettingsRefusal:
    """Return the refusal of a name that is none, with the known name that is most similar."""
    nearest = next(iter(nearest_names(name, NAMES, count=1)), NAMES[0])
    return SettingsRefusal(
        code="environment.unknown",
        names=("environment",),
        why=f"an environment is one of {', '.join(NAMES)}, or a class of your own as file.py:Class",
        do=f"--environment {f'{name}:Environment' if name.endswith('.py') else nearest}",
    )
