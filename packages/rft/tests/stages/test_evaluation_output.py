"""The files of an evaluation: what is written is read back, and what has changed since is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft.stages.evaluation_output import checked_output, manifest_path, saved_rows, write_output
from rft_core.errors import DataError, OptionsError

ROWS: list[dict[str, Any]] = [
    {"prompt_id": f"p:{n}", "sample": sample, "reward": float(sample), "label": "1"}
    for n in range(3)
    for sample in (0, 1)
]
MANIFEST = {"prompts": 3, "samples": 2, "data_sha256": "a"}
FIGURES = {"metrics": {"eval/accuracy": 0.5}}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write_output(path, MANIFEST, FIGURES, ROWS)
    assert saved_rows(path) == ROWS
    document = json.loads((path if path.suffix == ".json" else manifest_path(path)).read_text())
    assert document["metrics"] == FIGURES["metrics"]
    assert document["manifest"]["data_sha256"] == "a"
    files = {"rows.json"} if name == "rows.json" else {"rows.jsonl", "rows.manifest.json"}
    assert {found.name for found in tmp_path.iterdir()} == files


def changed(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lines: lines[:-1], "its content is not the one"),
        (lambda lines: [*lines, lines[0]], "its content is not the one"),
        (lambda lines: [*lines[:-1], lines[-1][:-4]], "1 lines are no whole JSON records"),
    ],
)
def test_rows_that_are_not_those_of_the_manifest_are_refused(change: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_output(path, MANIFEST, FIGURES, ROWS)
    changed(path, change)
    with pytest.raises(DataError) as caught:
        saved_rows(path)
    assert told in caught.value.problem.what


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lines: lines[:-1], "p:2#1 is missing, with 0 others"),
        (lambda lines: [*lines, lines[3]], "p:1#1 is there twice"),
        (lambda lines: [], "it holds no rows"),
        (lambda lines: ['{"prompt": "1"}\n'], "rows lack prompt_id or reward"),
    ],
)
def test_rows_without_a_manifest_are_counted_too(change: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_output(path, MANIFEST, FIGURES, ROWS)
    manifest_path(path).unlink()
    assert saved_rows(path) == ROWS
    changed(path, change)
    with pytest.raises(DataError) as caught:
        saved_rows(path)
    assert told in caught.value.problem.what


def test_a_document_holds_as_many_prompts_as_its_manifest_says(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write_output(path, MANIFEST, FIGURES, ROWS[:4])
    with pytest.raises(DataError, match="it holds 2 prompts, its manifest 3"):
        saved_rows(path)
    path.write_text("[]")
    with pytest.raises(DataError, match="no JSON object with manifest and rows"):
        saved_rows(path)


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    assert checked_output("") is None
    assert checked_output(str(tmp_path / "a.json")) == tmp_path / "a.json"
    for place in (tmp_path, tmp_path / "absent" / "a.json"):
        with pytest.raises(OptionsError) as caught:
            checked_output(str(place))
        assert caught.value.problem.code == "output.not_writable"
