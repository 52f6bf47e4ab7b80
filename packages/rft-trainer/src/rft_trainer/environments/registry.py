"""Environments by name, or from a file of your own."""

from __future__ import annotations

from collections.abc import Callable

from rft_core.errors import OptionsError
from rft_trainer.environments.calculator import Calculator
from rft_trainer.environments.episodes import EpisodeRunner, OwnEpisodes
from rft_trainer.environments.guess_number import GuessNumber
from rft_trainer.environments.names import NAMES, WHAT_THERE_IS, has_processes, nearest_name
from rft_trainer.environments.noisy import NoisyCalculator, NoisyHints
from rft_trainer.environments.processes import FileEpisodes
from rft_trainer.environments.records import Environment

_BY_NAME: dict[str, Callable[[], Environment]] = {
    "calculator": Calculator,
    "calculator-noise": NoisyCalculator,
    "guess-number": GuessNumber,
    "guess-number-noise": NoisyHints,
}
assert tuple(_BY_NAME) == NAMES, f"{tuple(_BY_NAME)} are registered, {NAMES} are told"


def environment_names() -> tuple[str, ...]:
    """The environments that need no file."""
    return NAMES


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
    if has_processes(name):
        path, _, found = name.rpartition(":")
        return FileEpisodes(
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
