"""Folders of a run's checkpoints: further ones are named, found, and know their run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_core.checkpoint_places import PLACES, add_place, other_places, run_of, step_directories


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "checkpoints"
    path.mkdir(parents=True)
    return path


def test_a_place_is_named_once_and_knows_its_run(folder: Path, tmp_path: Path) -> None:
    places = [tmp_path / "second", tmp_path / "third"]
    for place in (*places, places[0]):
        place.mkdir(exist_ok=True)
        add_place(folder, place)
    assert other_places(folder) == places
    assert run_of(places[1] / "step_000004") == folder.parent
    assert run_of(folder / "step_000004") == folder.parent


def test_a_file_that_is_absent_or_damaged_names_no_place(folder: Path) -> None:
    assert other_places(folder) == []
    (folder / PLACES).write_bytes(b"\xff\xfe")
    assert other_places(folder) == []
    (folder / PLACES).write_text("relative/place\n")
    assert other_places(folder) == []


def test_checkpoints_of_all_places_come_by_their_step(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "second"
    for path in (folder / "step_000002", folder / "step_1000000", place / "step_000002", place / "step_000010"):
        path.mkdir(parents=True)
    (place / ".staging-step_000011-1-aaaaaaaa").mkdir()
    add_place(folder, place)
    add_place(folder, tmp_path / "second")
    found = step_directories(folder)
    assert found == [folder / "step_000002", place / "step_000010", folder / "step_1000000"]
    assert step_directories(tmp_path / "nothing") == []
