"""A run's stored settings as flags of another command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from rft_cli.config.schema import schema
from rft_core.errors import DataError


def read_values(config: Path) -> dict[str, Any]:
    """The settings of a config.yaml by flat name."""
    if not config.is_file():
        raise DataError(
            code="run.no_config",
            what=f"{config} does not exist",
            where=str(config.parent),
            why="a run's settings are read from its config.yaml",
            do="give --pretrain and --eval_data instead of the run",
        )
    content = yaml.safe_load(config.read_text())
    values = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    values.pop("recipe", None)
    return values


def as_words(values: Mapping[str, Any], command: str) -> list[str]:
    """Return the values that `command` has, as its flags; a null or empty value is left to its default."""
    words: list[str] = []
    for name in schema(command):
        value = values.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, list):
            words += [f"--{name}", *(str(item) for item in cast("list[Any]", value))]
        else:
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words
