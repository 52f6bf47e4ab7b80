"""Records of stages."""

from __future__ import annotations

from pathlib import Path

from rft_genrec.pipeline.manifest import StageManifest, files_below, manifest_of, store, stored, written
from rft_genrec.pipeline.stages import Stage


def test_a_manifest_tells_what_has_changed(tmp_path: Path) -> None:
    outside = tmp_path / "raw.csv"
    outside.write_text("1")
    (tmp_path / "a.csv").write_text("1")
    stage = Stage("data", ("genrec", "data"), ("*.csv",), ("b.json",), "files", "b.json", (outside,))
    first = manifest_of(stage, tmp_path)
    store(tmp_path, "data", first)
    assert stored(tmp_path, "data") == first
    assert first.same_as(manifest_of(stage, tmp_path))
    (tmp_path / "a.csv").write_text("2")
    now = manifest_of(stage, tmp_path)
    assert now.difference(first) == "a.csv has changed"
    assert StageManifest(first.version, ("other",), first.reads).difference(first) == "its options have changed"
    assert StageManifest("9", first.words, first.reads).difference(first).startswith("it was made by rft-genrec")
    assert written(stage, tmp_path) == {}


def test_a_damaged_manifest_is_none_and_the_newest_checkpoint_counts(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "data.json").write_text("{")
    assert stored(tmp_path, "data") is None
    for step in (2, 10):
        folder = tmp_path / "sft" / "checkpoints" / f"step_{step:06d}" / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(str(step))
    [found] = files_below(tmp_path, ["sft/checkpoints/step_*[0-9]/model/*"])
    assert found.read_text() == "10"
