"""Reward from a function of the running program, called in this process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rewards.user_function import payload, score_of
from rft_trainer.workers.reward_arguments import bind
from rft_trainer.workers.user_file import RewardHandler

IN_PROCESS = "in-process:"
"""Prefix of such a function's name where a reward is named."""


class FunctionReward:
    """Reward that calls a function in this process, once a prompt with all its responses or once a response.

    Arguments and return value mean the same as for the function of a file (`user_file`): None and numbers that are
    not finite are no score. It is not isolated from the run: it has no deadline, and what it raises ends the run
    with its own traceback.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        """Check the function's signature.

        Args:
            function: see `user_file` for its signature.

        Raises:
            OptionsError: arguments that cannot be bound, whatever the columns of the data are.
        """
        self.function = function
        self.name = str(getattr(function, "__qualname__", type(function).__qualname__))
        self._handle = RewardHandler(function, _file(function), self.name, keeps_errors=False)
        # again when the data are known
        self._binding = bind(self._handle.facts, None)

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        calls = [list(call) for _, call in groupby(items, key=lambda item: item.prompt_id)]
        return [result for call in calls for result in self._scores(call)]

    def bind_columns(self, columns: Mapping[str, str]) -> None:
        """Bind the arguments to these columns of the data, each with a row that lacks it, or "".

        Raises:
            OptionsError: one cannot be bound.
        """
        self._binding = bind(self._handle.facts, columns)

    def close(self) -> None:
        """Do nothing: there are no processes to end."""

    def _scores(self, call: Sequence[RewardItem]) -> list[Score]:
        try:
            values: Any = self._handle(payload(call, self._binding))
        except Exception as error:
            # a note and no other error: the person's own traceback stays as it is
            error.add_note(f"in the reward function {self.name}, called with the responses to {call[0].prompt_id}")
            raise
        return [score_of(value) for value in values]


def _file(function: Callable[..., object]) -> str:
    code = function if inspect.isroutine(function) else type(function)
    try:
        return inspect.getsourcefile(code) or "the script"
    except TypeError:  # built into Python
        return "the script"
