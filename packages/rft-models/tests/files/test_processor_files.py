"""Processor files follow a model into a directory that lacks them, and nothing else does."""

from __future__ import annotations

from pathlib import Path

from rft_models.files.processor_files import PROCESSOR_FILES, keep_processor_files


def test_files_that_the_target_lacks_are_copied_and_others_are_kept(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    first, second, third, *absent = PROCESSOR_FILES
    for name in (first, second, "config.json"):
        (source / name).write_text(f"{name} of the source")
    (source / third).mkdir()
    (target / second).write_text("of the target")
    keep_processor_files(str(source), str(target))
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        first: f"{first} of the source",
        second: "of the target",
    }
    assert len(absent) == 2
