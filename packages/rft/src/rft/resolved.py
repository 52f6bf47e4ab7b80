"""Settings with their origins, the input of every part of a run. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

S = TypeVar("S")

OriginKind = Literal["default", "recipe", "file", "command line", "keyword argument"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of one value, and its text there."""

    kind: OriginKind
    file: str = ""
    line: int = 0
    """Counted from 1; 0 where there is no file."""
    text: str = ""
    """The value as it was written."""

    def __str__(self) -> str:
        if not self.file:
            return self.kind
        position = f"{self.file}:{self.line}" if self.line else self.file
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
