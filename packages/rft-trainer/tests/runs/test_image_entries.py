"""Rows of rollouts say where their images came from; bytes of the data are written once, under their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rft_trainer.data.images import ImageColumn, RowImage, images_of
from rft_trainer.data.media_cache import MediaStore, image_files
from rft_trainer.data.readers.rows import Row
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.runs.image_entries import entries_of, image_entries, image_path, keep_images
from rft_trainer.runs.step_report import rollout_row, rollout_rows
from rft_trainer.runs.trajectories import TrajectorySaver
from rft_trainer.tasks.drawn_images import SIZE, drawings

FIRST, SECOND, THIRD = (drawing.png for drawing in drawings(0, "test", 3))


@dataclass(frozen=True)
class Prepared:
    """Image n has n + 2 features."""

    images: tuple[bytes, ...]

    @property
    def num_images(self) -> int:
        return len(self.images)

    @property
    def num_tokens(self) -> int:
        return sum(number for _, number in self.spans)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return tuple((0, number + 2) for number in range(len(self.images)))


class FakeTokenizer:
    """Reads no text."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1]

    def encode_media(
        self, prompt: str, images: Sequence[bytes], *, where: str = "prompt"
    ) -> tuple[list[int], Prepared | None]:
        return [7], Prepared(tuple(images))


def seen(name: str, value: object, file: Path) -> Prompt:
    """A prompt whose row has this for its image."""
    row = Row({"image": value}, str(file), 3)
    images = images_of(row, ImageColumn("image"))
    _, media = MediaStore(FakeTokenizer()).encode("?", images, special=False, where=name)
    return Prompt(name, (7,), "<image>?", "a", "p", media=media)


def group(prompt: Prompt) -> RolloutGroup:
    rollout = Rollout(prompt.prompt_id, 0, (5,), (0.0,), (0.0,), "stop", 0, "a", 1.0, RewardStatus.OK)
    return RolloutGroup(prompt, 0, 0, (rollout, replace(rollout, sample_index=1)))


def test_a_row_says_where_its_images_are_and_how_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "1.png").write_bytes(FIRST)
    monkeypatch.chdir(tmp_path)
    prompt = seen("p:0", ["shapes/1.png", SECOND], Path("rows.jsonl"))
    row = rollout_row(prompt, group(prompt).rollouts[0])
    sides = {"width": SIZE, "height": SIZE}
    digests = [hashlib.sha256(data).hexdigest() for data in (FIRST, SECOND)]
    path = str(tmp_path / "shapes" / "1.png")
    assert row["images"] == [
        {"path": path, "where": "rows.jsonl:3:image[0]", "digest": digests[0], "bytes": len(FIRST), **sides}
        | {"tokens": 2},
        {"path": None, "where": "rows.jsonl:3:image[1]", "digest": digests[1], "bytes": len(SECOND), **sides}
        | {"tokens": 3},
    ]
    assert row["image_tokens"] == 5
    assert image_path(entries_of(row)[0], tmp_path) == Path(path)
    assert image_path(entries_of(row)[1], tmp_path) is None


def test_a_row_of_text_says_nothing_of_images() -> None:
    assert image_entries(Prompt("p", (1,), "?", None, "p")) == {}
    assert image_entries(Prompt("p", (1,), "?", None, "p", media="of a model")) == {}
    assert "images" not in rollout_row(
        Prompt("p", (1,), "?", None, "p"), group(Prompt("p", (), "", None, "")).rollouts[0]
    )


def test_bytes_of_the_data_are_written_once_and_no_more_than_are_kept(tmp_path: Path) -> None:
    groups = [group(seen(f"p:{n}", data, tmp_path / "x")) for n, data in enumerate((FIRST, SECOND, FIRST, THIRD))]
    prompts = [group.prompt for group in groups]
    rows = keep_images(rollout_rows(groups, 8), prompts, tmp_path, 2)
    files = [[entry["file"] for entry in entries_of(row)] for row in rows]
    first, second = (f"images/{hashlib.sha256(data).hexdigest()[:32]}.png" for data in (FIRST, SECOND))
    assert files == [[first], [first], [second], [second], [first], [first], [None], [None]]
    assert {file.name for file in (tmp_path / "images").iterdir()} == {Path(first).name, Path(second).name}
    assert (tmp_path / first).read_bytes() == FIRST
    assert image_path(entries_of(rows[0])[0], tmp_path) == tmp_path / first
    stamp = (tmp_path / first).stat().st_mtime_ns
    keep_images(rollout_rows(groups, 8), prompts, tmp_path, 2)
    assert (tmp_path / first).stat().st_mtime_ns == stamp, "what is there is not written again"


def test_images_that_are_files_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(FIRST)
    made = group(seen("p:0", "1.png", tmp_path / "rows.jsonl"))
    (row, _) = keep_images(rollout_rows([made], 8), [made.prompt], tmp_path / "kept", 8)
    assert "file" not in entries_of(row)[0]
    assert not (tmp_path / "kept").exists()


def test_trajectories_keep_images_and_rows_of_ones_own_stay_as_they_are(tmp_path: Path) -> None:
    saver = TrajectorySaver(tmp_path)
    saver.save([group(seen("p:0", SECOND, tmp_path / "x"))], step=1)
    (entry,) = entries_of(saver.read(1).rows[0])
    assert (tmp_path / str(entry["file"])).read_bytes() == SECOND
    own = {"prompt": "?", "response": "a", "reward": 1.0, "images": ["mine.png"]}
    saver.save([own], step=2)
    assert saver.read(2).rows[0]["images"] == ["mine.png"]


def test_the_files_behind_media_are_read_and_checked(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(FIRST)
    prompt = seen("p:0", ["1.png", SECOND], tmp_path / "rows.jsonl")
    assert image_files(prompt.media) == (FIRST, SECOND)
    assert image_files(None) == ()
    assert RowImage("x", "d", data=FIRST).size is None, "one that is made by hand states no size"
