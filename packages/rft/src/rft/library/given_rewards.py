"""Rewards that a program gives: names, functions, or several of either, as a setting and a reward in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rewards.combined import CombinedReward, RewardComponent
from rft_trainer.rewards.in_process import IN_PROCESS, FunctionReward
from rft_trainer.rewards.named import NamedReward

RewardFunction: TypeAlias = Callable[..., object]
"""A function of responses, labels, any columns of the rows: `docs/rewards.md`."""
GivenReward: TypeAlias = str | RewardFunction | Sequence[str | RewardFunction]


@dataclass(frozen=True, slots=True)
class ChosenReward:
    """The reward of a run: the text of its setting, and what is called in this process."""

    setting: str = ""
    """Value of `reward`; empty: the setting is left to its default."""
    function: FunctionReward | FunctionRewards | None = None


class FunctionRewards:
    """Sum of several rewards, functions of the program and named ones, each a part under its own name."""

    def __init__(self, parts: Sequence[str | FunctionReward]) -> None:
        self.function = tuple(part if isinstance(part, str) else part.function for part in parts)
        self.name = "+".join(map(_written, parts))
        self.parts = tuple(parts)
        self._sum: CombinedReward | None = None

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        if self._sum is None:
            self.bind_names(_not_bound)
        assert self._sum is not None
        return self._sum(items)

    def bind_columns(self, columns: Mapping[str, str]) -> None:
        """Bind the arguments of every function to these columns of the data."""
        for part in self.parts:
            if not isinstance(part, str):
                part.bind_columns(columns)

    def bind_names(self, make: Callable[[str], RewardComponent]) -> None:
        """Build the named parts with `make`, which knows the settings of the run."""
        self.close()
        with ExitStack() as built:
            components: list[RewardComponent] = []
            for part in self.parts:
                component = make(part) if isinstance(part, str) else RewardComponent(part.name, part)
                built.callback(component.reward.close)
                # a named reward has its part under its own name, as beside others on the command line
                named = NamedReward(component.name, component.reward) if isinstance(part, str) else component.reward
                components.append(replace(component, reward=named))
            # all were built: from here the sum closes them
            built.pop_all()
        self._sum = CombinedReward(components)

    def close(self) -> None:
        """End the processes of the named parts."""
        if self._sum is not None:
            self._sum.close()
            self._sum = None


def _not_bound(name: str) -> RewardComponent:
    raise AssertionError(f"the reward {name!r} is built with the settings of a run")


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
    given: list[object] = list(cast("Sequence[object]", reward)) if isinstance(reward, list | tuple) else [reward]
    if given and all(isinstance(part, str) and part for part in given):
        return ChosenReward(",".join(map(str, given)))
    for part in given:
        if not callable(part) and not (isinstance(part, str) and part):
            raise _refused(
                f"holds {part!r}" if len(given) > 1 else f"is {part!r}",
                "it is a name such as 'math' or 'file.py:function', a function, or a list of names and functions",
                "reward=FUNCTION",
            )
    if not given:
        raise _refused("is an empty list", "without a function nothing scores the responses", "reward=FUNCTION")
    if len(given) == 1:
        return chosen_reward(cast("str | RewardFunction", given[0]))
    parts = [part if isinstance(part, str) else FunctionReward(cast("RewardFunction", part)) for part in given]
    _refuse_equal_names(parts)
    together = FunctionRewards(parts)
    return ChosenReward(f"{IN_PROCESS}{together.name}", together)


def _refuse_equal_names(parts: Sequence[str | FunctionReward]) -> None:
    """Refuse two rewards that write the same part: metrics and weights would have one of them."""
    names = list(map(_part_name, parts))
    if not (twice := sorted({name for name in names if names.count(name) > 1})):
        return
    named = [part for part, name in zip(parts, names, strict=True) if name == twice[0] and isinstance(part, str)]
    why = "metrics and reward_weights name the parts of a reward after its functions"
    if len(named) > 1:
        do = f"reward=[{', '.join(_written(part) for part in parts if part not in named[1:])}]"
        raise _refused(f"holds {' and '.join(map(repr, named))}, which are both called {twice[0]}", why, do)
    what = f"holds two functions called {twice[0]}"
    if named:
        what = f"holds {named[0]!r} and a function called {twice[0]}, which is a part of it"
    raise _refused(what, why, "def a name for each of them")


def refuse_weights_in_order(weights: object, chosen: ChosenReward) -> None:
    """Refuse weights as a list, in the order of the rewards: they are given by the names of the parts.

    Raises:
        OptionsError: with the weights by name.
    """
    if not isinstance(weights, list | tuple):
        return
    numbers = list(cast("Sequence[object]", weights))
    parts: Sequence[str | FunctionReward] = getattr(chosen.function, "parts", ())
    given = parts or (chosen.setting.split(",") if "," in chosen.setting else ())
    names = list(map(_part_name, given)) or ["correctness"]
    # another number of parts than of weights: which is whose is not known
    named = dict(zip(names, numbers, strict=True)) if len(names) == len(numbers) else dict.fromkeys(names, 1.0)
    raise OptionsError(
        code="library.reward_weights",
        what=f"reward_weights is a list of {len(numbers)} numbers",
        where="keyword argument reward_weights",
        why="weights are given by the names of the reward's parts, which are those of its metrics",
        state="nothing was started",
        do=f"reward_weights={named!r}",
    )


def _part_name(part: str | FunctionReward) -> str:
    """Return the name of a reward's part beside others."""
    return part.rpartition(":")[2] if isinstance(part, str) else part.name


def _written(part: str | FunctionReward) -> str:
    return repr(part) if isinstance(part, str) else part.name


def _refused(what: str, why: str, do: str) -> OptionsError:
    return OptionsError(
        code="library.reward",
        what=f"reward {what}",
        where="argument reward",
        why=why,
        state="nothing was started",
        do=do,
    )
