"""JSON files of one object whose keys are the numbers of items: `.item.json`, `.index.json`, `.inter.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rft_core.file_access import access_remedy, closed_place
from rft_genrec.catalogue.file_errors import quoted, refused_file

_FORM = "a JSON object whose keys are the numbers from 0 without gaps"


def read_numbered(path: Path) -> tuple[Any, ...]:
    """Return the values of an object whose keys are 0, 1, 2 and so on, in the order of the keys.

    Raises:
        DataError: the file holds something else; with the key that is absent, foreign or there twice.
    """
    rows = read_object(path)
    absent = next((number for number in range(len(rows)) if str(number) not in rows), None)
    if absent is not None:
        numbers = {str(number) for number in range(len(rows))}
        foreign = next(key for key in rows if key not in numbers)
        raise refused_file(path, f"{len(rows)} keys without {absent}, but with {quoted(foreign)}", _FORM)
    return tuple(rows[str(number)] for number in range(len(rows)))


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; NaN, a key that is there twice and any other value are refused."""
    try:
        value = json.loads(
            path.read_text(encoding="utf-8-sig"), object_pairs_hook=_without_doubles, parse_constant=_no_number
        )
    except RecursionError as error:
        raise refused_file(path, "is nested too deeply", _FORM) from error
    except (OSError, ValueError) as error:
        raise refused_file(
            path, f"cannot be read: {closed_place(path) or error}", _FORM, access_remedy(path)
        ) from error
    if not isinstance(value, dict):
        raise refused_file(path, f"holds a {type(value).__name__}", _FORM)
    return value


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {quoted(counts.most_common(1)[0][0])} is there twice")
    return read


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
