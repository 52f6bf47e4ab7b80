"""Refusals of files, rows and semantic IDs: each says where the fault is, what was expected, and what was found."""

from __future__ import annotations

from pathlib import Path

from rft_core.errors import DataError
from rft_core.file_access import access_remedy, closed_place

MOST_SHOWN = 80
"""Characters of a value that a message quotes."""


def quoted(value: object) -> str:
    """Return a value as a message quotes it: on one line, and cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def refused_file(path: Path, what: str, why: str, do: str = "") -> DataError:
    """Return the refusal of a file that is absent, or that holds something else."""
    return DataError(code="genrec.file", what=what, where=str(path), why=why, do=do or _made_anew(path))


def _made_anew(path: Path) -> str:
    """The command that makes a file of a catalogue, by its name; of another one, that it is to be mended."""
    folder = path.parent
    if path.name.endswith(".index.json"):
        return _ids_anew(folder)
    if path.suffix == ".npy":
        return f"rft-train genrec embed --catalogue {folder}"
    return f"mend {path.name}"


def _ids_anew(folder: Path) -> str:
    """The command that gives items their IDs; it finds the vectors where the catalogue has one file of them."""
    command = f"rft-train genrec sid --overwrite --catalogue {folder}"
    return command if len([*folder.glob("*.emb-*.npy")]) == 1 else f"{command} --embeddings FILE"


def refuse_closed(folder: Path) -> None:
    """Refuse a directory that this user may not enter or list, or that lies in such a one: it would look empty.

    Raises:
        DataError: with the first such directory, its owner and its mode.
    """
    if closed := closed_place(folder):
        why = "files are opened by the user of the command"
        raise refused_file(folder, f"cannot be read: {closed}", why, access_remedy(folder))


def refused_cell(path: Path, row: int, place: tuple[int, str], expected: str, found: object) -> DataError:
    """Return the refusal of one value.

    Args:
        path: the file.
        row: counted from 1; a heading is row 1.
        place: number of the column, counted from 1, and its name; (0, "") where the row as a whole is meant.
        expected: what the value must be.
        found: what it is.
    """
    number, name = place
    column = f", column {name}" if name else ""
    return DataError(
        code="genrec.cell",
        what=f"row {row}{column}: expected {expected}, got {quoted(found)}",
        where=f"{path}:{row}:{number}" if number else f"{path}:{row}",
        why="every row is read as its column is declared; nothing in a file is run",
        do=f"mend row {row} of {path.name}",
    )


def refused_index(path: Path, what: str, why: str) -> DataError:
    """Return the refusal of semantic IDs that do not belong to the items or samples beside them."""
    return DataError(
        code="genrec.item_index",
        what=f"item index {path.name} does not match: {what}",
        where=str(path),
        why=why,
        do=_ids_anew(path.parent),
    )
