"""Settings with their origins, the input of every part of a run. No torch is imported here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Any, Generic, Literal, TypeVar

S = TypeVar("S")

OriginKind = Literal["default", "recipe", "file", "environment", "command line", "keyword argument", "derived"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of one value, and its text there."""

    kind: OriginKind
    file: str = ""
    """Path of a file, or name of a variable of the environment."""
    line: int = 0
    """Counted from 1; 0 where there is no file."""
    text: str = ""
    """The value as it was written; of a derived one, what it follows from."""

    def __str__(self) -> str:
        if self.kind == "derived":
            return self.text
        if self.kind == "environment":
            return f"environment variable {self.file}"
        if not self.file:
            return self.kind
        # a recipe comes with the program, and is shown by its name alone
        file = PurePath(self.file).name if self.kind == "recipe" else self.file
        position = f"{file}:{self.line}" if self.line else file
        return f"recipe {position}" if self.kind == "recipe" else position


@dataclass(frozen=True, slots=True)
class Resolved(Generic[S]):
    """The settings of one command and where each value came from."""

    command: str
    settings: S
    values: dict[str, Any]
    """Every value by its flat name."""
    origins: dict[str, Origin]
    recipe_name: str
    """Name of the last recipe or file given by --config; empty without one."""
    sources: tuple[Path, ...]
    """The files given by --config, in order."""
    notes: tuple[str, ...]
    """Settings that were given and have no effect beside the others."""
    config_yaml: str
    """The whole configuration as a file that `--config` reads back, each line with its origin."""

    def with_values(self, values: Mapping[str, Any], origin: Origin | None = None) -> Resolved[S]:
        """Return the settings with these values, flat and nested; without `origin` each keeps the one that it has."""
        origins = dict.fromkeys(values, origin) if origin is not None else {}
        return replace(
            self,
            settings=with_values(self.settings, values),
            values={**self.values, **values},
            origins={**self.origins, **origins},
        )


def with_choices(resolved: Resolved[S], before: Resolved[Any], after: Resolved[Any]) -> Resolved[S]:
    """Return the settings with what differs between two others, values and origins, in their text too.

    A start chooses some settings by its machine: in config.yaml a person sees the choice, and a resume has it.
    """
    text = resolved.config_yaml
    for name, value in after.values.items():
        if value != before.values[name]:
            resolved = resolved.with_values({name: value}, after.origins[name])
            # a number, a switch or a text in JSON is one in YAML as well
            line = f"{f'{name}: {json.dumps(value)}':<48} # {after.origins[name]}"
            text = re.sub(rf"^{re.escape(name)}:.*$", lambda _, line=line: line, text, flags=re.MULTILINE)
    return replace(resolved, config_yaml=text) if text != resolved.config_yaml else resolved


def with_values(settings: S, values: Mapping[str, Any]) -> S:
    """Return the nested settings of a command with these values, which have their flat names."""
    changed: Any = settings
    for group in fields(changed):
        part = getattr(changed, group.name)
        own = {item.name: values[item.name] for item in fields(part) if item.name in values}
        if own:
            changed = replace(changed, **{group.name: replace(part, **own)})
    return changed


def flat(settings: Any) -> dict[str, Any]:
    """Return the values of nested settings by their flat names."""
    parts = [getattr(settings, group.name) for group in fields(settings)]
    return {item.name: getattr(part, item.name) for part in parts for item in fields(part)}
