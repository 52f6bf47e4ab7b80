"""Contradictions between the settings of `rft-train genrec data`, and those without effect beside the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rft.config.rules.sourced_values import SourcedValues
from rft_core.errors import Problem

_FORMS = ("%Y-%m-%d", "%Y-%m")
_OF_SOURCES: dict[str, tuple[str, ...]] = {
    "items_file": ("amazon", "table"),
    "bad_rows": ("amazon", "movielens", "table"),
    **dict.fromkeys(
        (
            *("user_column", "item_column", "time_column", "title_column"),
            *("description_column", "brand_column", "categories_column"),
        ),
        ("table",),
    ),
    **dict.fromkeys(("users", "personas", "seed"), ("synthetic",)),
    **dict.fromkeys(
        ("title_filter", "start_date", "end_date", "min_items", "repeats", "user_k", "item_k"),
        ("amazon", "movielens", "table"),
    ),
    **dict.fromkeys(
        ("split", "valid_share", "test_share", "max_history"), ("amazon", "movielens", "table", "synthetic")
    ),
    "input": ("amazon", "movielens", "table", "minionerec"),
    "write_reviews": ("amazon",),
}
"""Sources for which a setting has an effect."""


def seconds_of(date: str) -> int | None:
    """Return the first second (UTC, since 1970) of a day or month, as 2016-10-01 or 2016-10; None for others."""
    for form in _FORMS:
        try:
            return int(datetime.strptime(date, form).replace(tzinfo=UTC).timestamp())
        except ValueError:
            continue
    return None


def problems(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions between the settings."""
    values = given.values
    if values["source"] != "synthetic" and not values["input"]:
        why = f"the interactions of {values['source']} are read from it"
        yield given.make_problem("genrec.no_input", ["source", "input"], why, "--input PATH")
    if values["source"] == "amazon" and not values["items_file"]:
        why = "titles are in the metadata, and an item without a title is left out"
        yield given.make_problem("genrec.no_items", ["source", "items_file"], why, "--items_file meta_CATEGORY.json.gz")
    name = values["dataset_name"]
    if name != Path(name).name or name == "..":
        why = "files of the catalogue begin with it: it holds no / and is not .."
        yield given.make_problem("genrec.name", ["dataset_name"], why, "--dataset_name mine")
    dates = [name for name in ("start_date", "end_date") if values[name]]
    wrong = [name for name in dates if seconds_of(values[name]) is None]
    for name in wrong:
        yield given.make_problem("genrec.date", [name], "a date is a day or a month", f"--{name} 2016-10-01")
    if not wrong and len(dates) == 2 and _seconds(values, "start_date") > _seconds(values, "end_date"):
        yield given.make_problem("genrec.window", dates, "the window ends before it begins", "--start_date 1996-10")
    if values["min_items"] and not values["start_date"]:
        names = ["min_items", "start_date"]
        yield given.make_problem("genrec.no_start", names, "without a start none can go back", "--start_date 2016-10")
    if values["split"] == "time" and values["valid_share"] + values["test_share"] >= 1:
        names = ["valid_share", "test_share"]
        yield given.make_problem("genrec.shares", names, "nothing is left to train on", "--valid_share 0.1")
    if values["write_reviews"] and not values["save_path"]:
        names = ["write_reviews", "save_path"]
        yield given.make_problem("genrec.no_output", names, "nothing is written", "--save_path DIRECTORY")


def idle_settings(given: SourcedValues, defaults: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting that was given and has no effect beside the others."""
    source = given.values["source"]
    lines = [
        f"{name} = {given.values[name]} has no effect with --source {source}"
        for name, sources in _OF_SOURCES.items()
        if source not in sources and given.values[name] != defaults[name]
    ]
    if given.values["split"] == "leave_last_out":
        lines += [
            f"{name} = {given.values[name]} has no effect with --split leave_last_out"
            for name in ("valid_share", "test_share")
            if given.values[name] != defaults[name]
        ]
    return lines


def _seconds(values: Mapping[str, Any], name: str) -> int:
    return seconds_of(values[name]) or 0
