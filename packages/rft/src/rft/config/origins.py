"""Origin of a setting, kept beside it from the first read to the messages and to config.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from rft.resolved import Origin

DEFAULT = Origin("default")
KEYWORD = Origin("keyword argument")


@dataclass(frozen=True, slots=True)
class GivenSetting:
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
