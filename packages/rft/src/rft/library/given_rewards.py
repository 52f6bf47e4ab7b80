"""Rewards that a program gives: names, functions, or several of either, as a setting and a reward in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rewards.combined import CombinedReward, RewardComponent
from rft_trainer.rewards.in_process import IN_PROCESS, FunctionReward

RewardFunction: TypeAlias = Callable[..., object]
"""A function of responses, labels, any columns of the rows: `docs/rewards.md`."""
GivenReward: TypeAlias = str | RewardFunction | Sequence[str] | Sequence[RewardFunction]


@dataclass(frozen=True, slots=True)
class ChosenReward:
    """The reward of a run: the text of its setting, and what is called in this process."""

    setting: str = ""
    """Value of `reward`; empty: the setting is left to its default."""
    function: FunctionReward | FunctionRewards | None = None


class FunctionRewards:
    """Sum of several functions of the program, each a part of the reward under its own name."""

    def __init__(self, functions: Sequence[FunctionReward]) -> None:
        self.function = tuple(one.function for one in functions)
        self.name = "+".join(one.name for one in functions)
        self._functions = tuple(functions)
        self._sum = CombinedReward([RewardComponent(one.name, one) for one in functions])

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        return self._sum(items)

    def bind_columns(self, columns: Mapping[str, str]) -> None:
        """Bind the arguments of every function to these columns of the data."""
        for one in self._functions:
            one.bind_columns(columns)

    def close(self) -> None:
        """Do nothing: there are no processes to end."""


def chosen_reward(reward: GivenReward | None) -> ChosenReward:
    """Return the reward that `reward` names or is.

    Raises:
        OptionsError: no function and no name; two functions of one name; arguments that cannot be bound.
    """
    if reward is None:
        return ChosenReward()
    if isinstance(reward, str):
        return ChosenReward(reward)
    if callable(reward):
        one = FunctionReward(reward)
        return ChosenReward(f"{IN_PROCESS}{one.name}", one)
    functions: list[object] = list(cast("Sequence[object]", reward)) if isinstance(reward, list | tuple) else [reward]
    if functions and all(isinstance(name, str) for name in functions):
        return ChosenReward(",".join(map(str, functions)))
    for function in functions:
        if not callable(function):
            raise _refused(
                f"holds {function!r}" if len(functions) > 1 else f"is {function!r}",
                "it is a name such as 'math' or 'file.py:function', a function, or a list of either",
                "reward=FUNCTION",
            )
    if not functions:
        raise _refused("is an empty list", "without a function nothing scores the responses", "reward=FUNCTION")
    parts = [FunctionReward(cast("RewardFunction", function)) for function in functions]
    names = [part.name for part in parts]
    if len(parts) == 1:
        return ChosenReward(f"{IN_PROCESS}{names[0]}", parts[0])
    if twice := sorted({name for name in names if names.count(name) > 1}):
        why = "metrics and reward_weights name the parts of a reward after its functions"
        raise _refused(f"holds two functions called {twice[0]}", why, "def a name for each of them")
    together = FunctionRewards(parts)
    return ChosenReward(f"{IN_PROCESS}{together.name}", together)


def _refused(what: str, why: str, do: str) -> OptionsError:
    return OptionsError(
        code="library.reward",
        what=f"reward {what}",
        where="argument reward",
        why=why,
        state="nothing was started",
        do=do,
    )
