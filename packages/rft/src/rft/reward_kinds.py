"""The kinds of reward beside a function: one record each, from which every list of their flags is derived.

A new kind is one module, with its settings, its reward and a builder, and one row here. No torch is imported here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Settings = TypeVar("Settings", bound=type)


@dataclass(frozen=True, slots=True)
class RewardKind:
    """A kind of reward, which is part of a run's reward where one of its flags is given."""

    name: str
    group: str
    """Its group of settings in those of a command."""
    builder: str
    """module:function of (settings, machine), which returns its `RewardComponent`s."""
    directory_flags: tuple[str, ...] = ()
    """Flags that name models of this process: every rank reads them, and they must take the images of prompts."""
    service_flags: tuple[str, ...] = ()
    """Flags that name servers, which are tried before a run begins."""
    other_flags: tuple[str, ...] = ()
    """Flags that turn it on and name neither."""
    joins_directories: bool = False
    """Whether a directory flag holds several, joined by commas, each DIR or NAME=DIR."""
    images_from: str = ""
    """The model that a refusal of one without images asks for."""
    checker: str = ""
    """module:function of (settings), which tries its servers; empty = nothing to try."""
    part_names: str = ""
    """module:function of (settings), which returns the names of its parts; empty = one part of its own name."""
    settings_type: str = ""
    """module:Class of its group, where the commands' settings do not list it themselves."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags that turn it on."""
        return (*self.directory_flags, *self.service_flags, *self.other_flags)

    def values(self, settings: Any) -> dict[str, str]:
        """Return the flags that are given in a command's settings, with their values."""
        group = getattr(settings, self.group)
        return {flag: getattr(group, flag) for flag in self.flags if getattr(group, flag)}

    def names(self, settings: Any) -> list[str]:
        """Return the names of its parts of the reward; none where no flag is given."""
        if not self.values(settings):
            return []
        return list(load(self.part_names)(settings)) if self.part_names else [self.name]

    def build(self, settings: Any, machine: Any) -> list[Any]:
        """Return its components of the reward, ready to score; none where no flag is given."""
        return list(load(self.builder)(settings, machine)) if self.values(settings) else []

    def check(self, settings: Any) -> None:
        """Try its servers, where it has any."""
        if self.checker and self.values(settings):
            load(self.checker)(settings)


REWARD_KINDS: tuple[RewardKind, ...] = (
    RewardKind(
        "reward_model",
        group="reward_models",
        builder="rft.build.rewards:model_components",
        part_names="rft.reward_names:model_names",
        directory_flags=("reward_pretrain",),
        joins_directories=True,
        images_from="a vision-language reward model",
    ),
    RewardKind(
        "reward_server",
        group="reward_models",
        builder="rft.build.rewards:server_components",
        part_names="rft.reward_names:server_names",
        service_flags=("remote_rm_url",),
        checker="rft.build.rewards:server_components",
    ),
    RewardKind(
        "judge",
        group="judge",
        builder="rft.build.judge:judge_components",
        directory_flags=("judge_pretrain",),
        service_flags=("judge_url",),
        images_from="a vision-language model",
        checker="rft.build.judge:check_judge",
    ),
)


def load(reference: str) -> Any:
    """Return what module:name stands for; it is imported only now, because it may need torch."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def reward_flags() -> tuple[str, ...]:
    """Return the flags of all kinds that are a reward beside the function."""
    return tuple(flag for kind in REWARD_KINDS for flag in kind.flags)


def build_order() -> list[RewardKind]:
    """Return the kinds in the order of the parts of a reward: a server is tried before a model is loaded."""
    return sorted(REWARD_KINDS, key=lambda kind: bool(kind.directory_flags))


def given_directories(values: Mapping[str, Any]) -> list[tuple[RewardKind, str, str]]:
    """Return (kind, flag, value) of the directory flags that are given among flat values."""
    return [
        (kind, flag, str(values[flag])) for kind in REWARD_KINDS for flag in kind.directory_flags if values.get(flag)
    ]


def with_reward_groups(owner: Settings) -> Settings:
    """Decorator below `dataclass`: adds the groups of settings of the kinds that the class does not list itself."""
    for kind in REWARD_KINDS:
        if kind.group not in owner.__annotations__:
            settings_type = load(kind.settings_type)
            owner.__annotations__[kind.group] = settings_type
            setattr(owner, kind.group, field(default_factory=settings_type))
    return owner
