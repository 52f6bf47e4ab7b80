"""The table of the guide's fields as pages show it: their names, the settings here, and both defaults."""

from __future__ import annotations

from rft.config.schema import schema
from rft.config.values import as_text
from rft_cli.pretrainer.fields import COMMAND, FIELDS, GuideField


def field_table() -> list[tuple[str, dict[str, str]]]:
    """Return the guide's fields by group, a line each: what the help of the command shows."""
    title = "fields of the pre-trainer's guide, as flags and in files; its default, ours"
    return [(title, {f"{row.group}.{row.name}": line(row) for row in FIELDS})]


def line(row: GuideField) -> str:
    """Return the setting of a field with both defaults, and what more there is to say."""
    own = own_default(row)
    place = f"--{row.to}; {row.default}, {own}" if own else f"{row.default}"
    return f"{place}; {row.about}" if row.about else place


def own_default(row: GuideField) -> str:
    """Return the default of the setting here, as it would be written; empty where no one setting stands for it."""
    setting = schema(COMMAND).get(row.to)
    return (as_text(setting.default) or "empty") if setting else ""
