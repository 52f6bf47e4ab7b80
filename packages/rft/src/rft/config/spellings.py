"""Settings under the names of another program, and settings that follow from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rft.config.origins import GivenSetting
from rft.config.rules.sourced_values import SourcedValues
from rft.config.schema import Setting
from rft.resolved import Origin
from rft_core.errors import Problem

_DERIVED = Origin("derived")


@dataclass(frozen=True, slots=True)
class Derived:
    """Settings that follow from others, with what is said of them."""

    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    origin: Origin = _DERIVED
    """That of the values: it says what they follow from."""
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


Derivation = Callable[[SourcedValues], Derived]
"""Values that follow from all that is given; asked once, when every source is merged and every value is legal."""


@dataclass(frozen=True, slots=True)
class Translated:
    """The meaning of a setting of another program here."""

    options: tuple[GivenSetting, ...] = ()
    """Settings of the command."""
    notes: tuple[str, ...] = ()
    """What is said of one that changes nothing, or that means something else here."""
    problems: tuple[Problem, ...] = ()
    later: Derivation | None = None
    """Where its meaning depends on other settings."""


@dataclass(frozen=True, slots=True)
class Spellings:
    """The settings of another program that a command takes under their own names.

    Example: with the row `training_batch_size` of the group training, the command takes `--training-batch-size 8`,
    `training.batch_size: 8` and `training: {batch_size: 8}`.
    """

    table: Mapping[str, Setting]
    """Every setting of the other program by its flat name."""
    environment: Mapping[str, str]
    """Variables of the environment that give one, and its name."""
    translate: Callable[[GivenSetting, Any], Translated]
    """(setting as it was written, its value) -> what it means here."""

    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Values of the other program by the command's own setting, and the word that has their meaning."""

    def in_own_words(self, option: GivenSetting) -> GivenSetting:
        """Return a setting of the command with its own word for a value of the other program."""
        words = self.words.get(option.name, {})
        return replace(option, texts=tuple(words.get(text.lower(), text) for text in option.texts))

    @property
    def proposed(self) -> dict[str, Setting]:
        """Those that a message may propose: each by its full name, without the shorter ones."""
        return {name: row for name, row in self.table.items() if row.field}
