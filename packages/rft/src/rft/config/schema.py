"""The settings of a command as a flat table: one row per flag, read from the dataclasses.

A group of the command's class whose field has the metadata `{"prefixed": True}` gives its name to its settings: a
command with two groups of one class, `teacher` and `student`, has `--teacher-hidden` and `--student-hidden`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from rft.config import commands

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Required:
    """Placeholder in the place of a default, for a setting that has none."""


REQUIRED = Required()


@dataclass(frozen=True, slots=True)
class Setting:
    """One flag of a command.

    Example: `Setting("top_k", "sampling", int, 0, {"minimum": -1})` is `--top_k`, kept in
    `settings.sampling.top_k`.
    """

    name: str
    group: str
    kind: Any
    """The annotation: bool, int, float, str, a Literal, a pair, or one of them with None."""
    default: object
    metadata: Mapping[str, Any]
    field: str = ""
    """Name in its group; empty where that is the flag's."""

    @property
    def field_name(self) -> str:
        """Name of its field in the group."""
        return self.field or self.name

    @property
    def full_names(self) -> tuple[str, str]:
        """Names with that of the group, which are accepted beside its own: `sampling.top_k` and `sampling_top_k`."""
        return f"{self.group}.{self.field_name}", f"{self.group}_{self.field_name}"

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names with the same meaning."""
        prefix = f"{self.group}_" if self.field else ""
        return tuple(prefix + alias for alias in self.metadata.get("aliases", ()))

    @property
    def is_switch(self) -> bool:
        """True when the flag alone means true."""
        return self.base is bool

    @property
    def is_pair(self) -> bool:
        """True when the flag takes several values."""
        return get_origin(self.kind) is tuple

    @property
    def may_be_none(self) -> bool:
        """True when `none` is a value."""
        return NoneType in get_args(self.kind)

    @property
    def base(self) -> Any:
        """The annotation without None."""
        if not self.may_be_none:
            return self.kind
        return next(kind for kind in get_args(self.kind) if kind is not NoneType)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names to choose from, empty where the value is free."""
        names = get_args(self.base)
        return names if names and all(isinstance(choice, str) for choice in names) else ()


@cache
def schema(command: str) -> dict[str, Setting]:
    """Every setting of `command` by its flat name, in the order of the groups."""
    table: dict[str, Setting] = {}
    owner = commands.load(commands.configured(command).settings)
    kinds = get_type_hints(owner)
    for group in fields(owner):
        # a command may give a group other defaults than its class has
        prototype = group.default_factory() if group.default_factory is not MISSING else None
        for row in _rows(group, kinds[group.name], prototype):
            assert row.name not in table, f"{row.name} is in two groups of {command}"
            table[row.name] = row
    return table


def _rows(group: Field[Any], kind: type, prototype: object | None) -> list[Setting]:
    kinds = get_type_hints(kind)
    rows: list[Setting] = []
    for item in fields(kind):
        default = getattr(prototype, item.name) if prototype is not None else _own_default(item)
        name = flat_name(group, item.name)
        own = item.name if name != item.name else ""
        rows.append(Setting(name, group.name, kinds[item.name], default, item.metadata, own))
    return rows


def flat_name(group: Field[Any], name: str) -> str:
    """Return the flag and the key of a setting, from the field of its group and its own."""
    return f"{group.name}_{name}" if group.metadata.get("prefixed") else name


def _own_default(item: Field[Any]) -> object:
    if item.default is not MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not MISSING else REQUIRED


def build(owner: type[S], values: Mapping[str, object]) -> S:
    """Nested settings of the class `owner` from flat values (every setting must be there)."""
    kinds = get_type_hints(owner)
    groups: dict[str, Any] = {}
    for group in fields(cast("Any", owner)):
        kind = kinds[group.name]
        groups[group.name] = kind(**{item.name: values[flat_name(group, item.name)] for item in fields(kind)})
    return owner(**groups)


def commands_with(name: str) -> list[str]:
    """The commands that take a setting called `name`."""
    return [command for command in commands.known() if name in schema(command)]
