"""The first closed place on the way to a file, seen by a user that is not root."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft_core.file_access import access_remedy, closed_place

NOBODY = 65534


@pytest.fixture
def way() -> Iterator[Path]:
    """A file below two directories that everybody may enter; files are opened as another user where root runs this."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    file = root / "a" / "b" / "rows.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("{}\n")
    as_root = os.geteuid() == 0
    if as_root:
        os.seteuid(NOBODY)
    yield file
    if as_root:
        os.seteuid(0)
    for place in (file.parent.parent, file.parent):
        place.chmod(0o700)
    shutil.rmtree(root)


def close(place: Path) -> None:
    """Take every right away, as the owner."""
    me = os.geteuid()
    if me == NOBODY:
        os.seteuid(0)
    place.chmod(0)
    if me == NOBODY:
        os.seteuid(NOBODY)


def test_an_open_way_is_told_as_nothing(way: Path) -> None:
    assert closed_place(way) == ""
    assert closed_place(way.parent) == ""
    assert access_remedy(way) == ""
    assert closed_place(way.with_name("absent")) == ""


@pytest.mark.parametrize(("depth", "deed"), [(0, "read"), (1, "enter"), (2, "enter")])
def test_the_first_closed_place_is_told_with_user_owner_and_mode(way: Path, depth: int, deed: str) -> None:
    closed = [way, *way.parents][depth]
    close(closed)
    owner_alone = f"chmod u+{'r' if depth == 0 else 'x'} {closed}"
    theirs = closed.stat().st_uid != os.geteuid()
    remedy = access_remedy(way)
    assert remedy.startswith("ask root (uid 0) for access (chmod o+") if theirs else remedy == owner_alone
    said = closed_place(way)
    assert f"may not {deed} {closed}, which belongs to " in said
    assert f"uid {os.geteuid()}" in said
    assert said.endswith(("mode ----------", "mode d---------"))


def test_a_directory_that_cannot_be_listed_is_closed(way: Path) -> None:
    folder = way.parent
    close(folder)
    assert f"may not enter {folder}" in closed_place(folder)
