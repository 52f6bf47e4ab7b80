"""Where a value was written: kept beside it from the first read to the messages and to config.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OriginKind = Literal["default", "recipe", "file", "command line", "keyword argument"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value came from, and how it was written there."""

    kind: OriginKind
    file: str = ""
    line: int = 0
    """Counted from 1; 0 where there is no file."""
    text: str = ""
    """The value as it was written."""

    def __str__(self) -> str:
        if not self.file:
            return self.kind
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"recipe {place}" if self.kind == "recipe" else place


DEFAULT = Origin("default")
KEYWORD = Origin("keyword argument")


@dataclass(frozen=True, slots=True)
class Given:
    """One setting as a person wrote it, not yet understood."""

    written: str
    """The name as written, with the dashes of a flag."""
    name: str
    """The name with underscores and without dashes."""
    texts: tuple[str, ...]
    """The values as written; empty for a bare flag."""
    origin: Origin
    is_null: bool = False
    """An unquoted null of a file."""
