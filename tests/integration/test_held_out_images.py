"""A held-out image that has changed underneath a run is noticed by its resume, of every stage that evaluates rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from support.runs import ForkServer
from support.vision_task import VisionTask, make_vision_task

pytestmark = pytest.mark.xdist_group("image_runs")


@pytest.fixture(scope="module")
def images(memory_root: Path) -> VisionTask:
    return make_vision_task(memory_root / "held_out_images")


@pytest.mark.parametrize("stage", ["sft", "dpo", "rl"])
def test_a_changed_held_out_image_is_refused_by_a_resume(
    server: ForkServer, images: VisionTask, runs: Path, stage: str
) -> None:
    held_out = runs / "heldout.jsonl"
    row = json.loads(images.held_out.read_text().splitlines()[0])
    shutil.copy(images.root / row["image"], runs / "seen.png")
    held_out.write_text(json.dumps({**row, "image": "seen.png"}) + "\n")
    common = ("--eval_data", held_out, "--save_path", runs / "run", "--max_steps", 1)
    given = images.rl_words(*common) if stage == "rl" else images.words(*common, "--train_batch_size", 4)
    server.must_finish(stage, *given)
    resumed = ("resume", str(runs / "run"), "--max_steps", "2", "--json_errors")
    Image.new("RGB", (16, 16), (1, 2, 3)).save(runs / "seen.png")
    ended = server.run(*resumed)
    assert ended.code == 4, ended.output
    assert "identity.files_changed" in ended.output
    assert "eval_data" in ended.output
    shutil.copy(images.root / row["image"], runs / "seen.png")
    server.must_finish(*resumed)
