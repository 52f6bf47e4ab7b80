"""The help of a command: every flag with its meaning, its unit and the value it has now, in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import tyro

from rft.settings import COMMANDS
from rft_cli.config.resolve import merge
from rft_cli.config.schema import REQUIRED

_HOW = """

Values come from the defaults, then from --config FILE_OR_RECIPE (YAML, the names of the flags as keys; rft-train
recipes lists recipes), then from flags; the later wins. - and _ are alike. A switch is --x, --no-x, or --x with
true, false, yes, no, 1 or 0. --print_config shows every value with its origin and starts nothing; --json_errors
prints problems as one JSON line."""


def print_help(command: str, argv: Sequence[str] = ()) -> None:
    """Print the help of a command; a `--config` among the words changes the values that are shown."""
    owner: Any = COMMANDS[command]
    try:
        tyro.cli(
            owner,
            prog=f"rft-train {command}",
            description=(owner.__doc__ or "") + _HOW,
            args=["--help"],
            default=_shown_values(command, argv),
            config=(tyro.conf.OmitArgPrefixes,),
            use_underscores=True,
        )
    except SystemExit:
        return


def _shown_values(command: str, argv: Sequence[str]) -> Any:
    merged = merge(command, [word for word in argv if word not in ("-h", "--help")])
    owner = COMMANDS[command]
    kinds = get_type_hints(owner)
    groups: dict[str, Any] = {}
    for group in fields(owner):
        names = [item.name for item in fields(kinds[group.name])]
        values = {name: tyro.MISSING if merged.values[name] is REQUIRED else merged.values[name] for name in names}
        groups[group.name] = kinds[group.name](**values)
    return owner(**groups)
