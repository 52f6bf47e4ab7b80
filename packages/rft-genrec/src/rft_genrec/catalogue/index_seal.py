"""The seal of an index: what its file and the items were when its IDs were made, beside it as `NAME.index.seal.json`.

Checks of an index find IDs that are malformed or missing. One changed code leaves it well-formed: the seal finds that.
An index of another program has none, and is read without one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft_core.durable_files import replace_text
from rft_genrec.catalogue.file_errors import refused_index
from rft_genrec.catalogue.json_objects import read_object
from rft_genrec.catalogue.records import Catalogue


def seal_file(index: Path) -> Path:
    """Return the place of the seal of an index."""
    return index.with_name(f"{index.name.removesuffix('.json')}.seal.json")


def write_seal(index: Path, catalogue: Catalogue) -> None:
    """Write the seal of an index, which is there and is that of these items."""
    record = {
        "sha256": _digest(index.read_bytes()),
        "codes": codes_by_level(read_object(index)),
        "items": len(catalogue),
        "titles_sha256": _titles(catalogue),
    }
    replace_text(seal_file(index), json.dumps(record, indent=2) + "\n")


def remove_seal(index: Path) -> None:
    """Take the seal of an index away, before the index is written anew."""
    seal_file(index).unlink(missing_ok=True)


def check_seal(index: Path, catalogue: Catalogue) -> None:
    """Compare an index and its items with the seal, where there is one.

    Raises:
        DataError: the index has changed since it was made, or it was made of other items; with both hashes.
    """
    if not seal_file(index).is_file():
        return
    sealed = read_object(seal_file(index))
    found = _digest(index.read_bytes())
    if sealed.get("sha256") != found:
        what = f"its SHA-256 is {found[:12]}, {seal_file(index).name} has {str(sealed.get('sha256'))[:12]}"
        codes, were = codes_by_level(read_object(index)), sealed.get("codes")
        # a seal of an earlier version has no codes
        if were is not None and were != codes:
            what += f"; codes in use by level are {codes}, and were {were}"
        raise refused_index(index, what, "the file has changed since its IDs were made")
    titles = _titles(catalogue)
    if sealed.get("items") != len(catalogue) or sealed.get("titles_sha256") != titles:
        here = f"{len(catalogue)} items with titles of SHA-256 {titles[:12]}"
        what = f"there are {here}, it was made of {sealed.get('items')} with {str(sealed.get('titles_sha256'))[:12]}"
        raise refused_index(index, what, "the IDs are those of other items")


def codes_by_level(rows: Mapping[str, Any]) -> list[int]:
    """Return how many different codes each level of an index has, of its lists of tokens by item."""
    levels: list[set[str]] = []
    for tokens in rows.values():
        for level, token in enumerate(tokens if isinstance(tokens, list) else ()):
            if level == len(levels):
                levels.append(set())
            levels[level].add(str(token))
    return [len(codes) for codes in levels]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _titles(catalogue: Catalogue) -> str:
    return _digest(json.dumps([item.title for item in catalogue.items]).encode())
