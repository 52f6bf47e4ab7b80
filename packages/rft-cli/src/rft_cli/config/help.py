"""The help of a command: every flag with its meaning, what it takes and the value it has now, in groups."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rft.config.commands import load, typed
from rft.config.merged_sources import MergedSources
from rft.config.schema import REQUIRED, Setting, flat_name
from rft.config.values import as_text, limits
from rft.resolved import Origin
from rft_cli.config.meanings import meanings
from rft_cli.config.resolve import merge
from rft_cli.records.discovery import find_command

_HOW = """Values come from the defaults, then from --config FILE_OR_RECIPE (YAML, the names of the flags as keys; \
rft-train recipes lists recipes), then from flags; the later wins. - and _ are alike. A switch is --x, --no-x, or --x \
with true, false, yes, no, 1 or 0. --print_config shows every value with its origin and starts nothing; --json_errors \
prints problems as one JSON line."""
HELP = ("-h", "--help")
HELP_ALL = ("--help-all", "--help_all")
_PAGE_WIDTH = 100
"""Longer lines are hard to read, however wide the terminal is."""


def print_help(command: str, argv: Sequence[str] = ()) -> None:
    """Print the help of a command; a `--config` among the words changes the values that are shown.

    `--help` has the settings that most runs choose, a line or two each; `--help-all` has the whole text of all.
    """
    record = find_command(command)
    owner: Any = load(record.settings)
    essential = record.essential.split()
    shows_all = not essential or any(word in HELP_ALL for word in argv)
    merged = merge(command, [word for word in argv if word not in (*HELP, *HELP_ALL)])
    console = Console(highlight=False)
    console = Console(highlight=False, width=min(console.width, _PAGE_WIDTH))
    console.print(f"usage: rft-train {typed(command)} [-h] [--help-all] [OPTIONS]\n", markup=False)
    console.print(f"{inspect.getdoc(owner)}\n\n{_HOW}\n", markup=False)
    kinds = get_type_hints(owner)
    for group in fields(owner):
        kind = kinds[group.name]
        if shows_all:
            console.print(_panel(group, kind, merged))
        elif chosen := {flat_name(group, item.name) for item in fields(kind)}.intersection(essential):
            console.print(_short_panel(group.name, sorted(chosen, key=essential.index), kind, merged))
    if not shows_all:
        for title, rows in load(record.help_tables)() if record.help_tables else ():
            console.print(_named(title, rows))
        number = len(merged.schema) - len(essential)
        console.print(f"{number} settings more, and the whole text of each: rft-train {typed(command)} --help-all")


def _short_panel(name: str, chosen: Sequence[str], kind: type, merged: MergedSources) -> Panel:
    """Return the chosen settings of a group in a frame, each with the first sentence of its meaning."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=28, overflow="fold")
    table.add_column(ratio=1)
    for item in chosen:
        setting = merged.schema[item]
        first = meanings(kind)[setting.field_name].partition(". ")[0].rstrip(".")
        takes = "" if setting.is_switch or setting.choices else _takes(setting).split(" of ")[0].split(" above ")[0]
        words = f" {{{', '.join(setting.choices)}}}" if setting.choices else ""
        value = _value(merged.values[item], merged.origins[item]).replace("(default: ", "(")
        flag = Text.assemble((f"--{item}", "bold"), " ", (takes, "cyan"))
        table.add_row(flag, Text.assemble(first, (words, "cyan"), " ", (value, "dim")))
    return Panel(table, title=name, title_align="left", border_style="dim")


def _named(title: str, rows: Mapping[str, str]) -> Panel:
    """Return names and a line about each in a frame; what does not fit into the line is cut."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=max(map(len, rows)))
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for name, about in rows.items():
        table.add_row(Text(name, "bold"), about)
    return Panel(table, title=title, title_align="left", border_style="dim")


def _panel(group: Field[Any], kind: type, merged: MergedSources) -> Panel:
    """Return one group of settings in a frame."""
    texts = meanings(kind)
    lines: list[RenderableType] = [Text(inspect.getdoc(kind) or "", "italic")]
    for item in fields(kind):
        setting = merged.schema[flat_name(group, item.name)]
        lines.append(Text.assemble((_flags(setting), "bold"), " ", (_takes(setting), "cyan")))
        value = _value(merged.values[setting.name], merged.origins[setting.name])
        lines.append(Padding(Text.assemble(texts[item.name], " ", (value, "dim")), (0, 0, 0, 6)))
    return Panel(Group(*lines), title=group.name, title_align="left", border_style="dim")


def _flags(setting: Setting) -> str:
    return f"--{setting.name}, --no_{setting.name}" if setting.is_switch else f"--{setting.name}"


def _takes(setting: Setting) -> str:
    """Return the kind of value and its bounds: the words to choose from, or STR, INT, FLOAT."""
    if setting.is_switch:
        return ""
    word = "FLOAT FLOAT" if setting.is_pair else f"{{{','.join(setting.choices)}}}" if setting.choices else ""
    word = word or setting.base.__name__.upper()
    word = f"[{word}]" if "bare" in setting.metadata else word
    word = f"{word}|none" if setting.may_be_none else word
    bounds = limits(setting)
    return f"{word} {bounds}" if bounds else word


def _value(value: object, origin: Origin) -> str:
    """Return the default, or another value with the file that gives it."""
    if value is REQUIRED:
        return "(required)"
    text = f"(default: {as_text(value) or 'empty'})"
    return text if origin.kind == "default" else f"{text} ({replace(origin, file=Path(origin.file).name)})"
