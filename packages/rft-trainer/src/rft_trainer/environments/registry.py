"""Environments by name, or from a file of your own."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from rft_algos.errors import OptionsError
from rft_trainer.environments.calculator import Calculator
from rft_trainer.environments.episodes import EpisodeRunner, OwnEpisodes
from rft_trainer.environments.guess_number import GuessNumber
from rft_trainer.environments.processes import FileEpisodes
from rft_trainer.environments.records import Environment

_BY_NAME: dict[str, Callable[[], Environment]] = {"calculator": Calculator, "guess-number": GuessNumber}


def environment_names() -> tuple[str, ...]:
    """The environments that need no file."""
    return tuple(_BY_NAME)


def environment_by_name(
    name: str, *, num_workers: int = 1, tool_timeout: float = 10.0, rollout_timeout: float = 60.0
) -> EpisodeRunner:
    """The environment called `name`, or the class of a file given as `path/to/file.py:Class`.

    Args:
        name: one of `environment_names()`, or file.py:Class (the last colon separates the two).
        num_workers, tool_timeout, rollout_timeout: as for `FileEpisodes`; our own run in this process.

    Raises:
        OptionsError: no such name, file or class, or a class that cannot be used.
        DataError: the file raises while it is imported.
    """
    if name in _BY_NAME:
        return OwnEpisodes(_BY_NAME[name])
    path, colon, found = name.rpartition(":")
    if colon and path and found:
        return FileEpisodes(
            path, found, num_workers=num_workers, tool_timeout=tool_timeout, rollout_timeout=rollout_timeout
        )
    nearest = difflib.get_close_matches(name, _BY_NAME, n=1)
    remedy = f"{name}:Environment" if name.endswith(".py") else (nearest[0] if nearest else "calculator")
    raise OptionsError(
        code="environment.unknown",
        what=f"environment {name!r}; there are {', '.join(_BY_NAME)}, and file.py:Class",
        where="--environment",
        why="an environment is one of these names or a class of your own",
        state="nothing was started",
        do=f"--environment {remedy}",
    )
