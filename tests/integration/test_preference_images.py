"""Pairs about images: both responses stand under the images of their prompt, in rows as TRL's data sets have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.compare import differences, final_checkpoint, read_rows
from support.references import KILLED
from support.runs import ForkServer
from support.setup import ALPHABET
from support.vision_task import VisionTask, make_vision_task, write_rows

pytestmark = pytest.mark.xdist_group("image_runs")

SHORT = ("--max_steps", "3", "--train_batch_size", "4", "--micro_train_batch_size", "2", "--learning_rate", "1e-3")
SHORT = (*SHORT, "--save_steps", "1", "--save_interval", "0", "--eval_steps", "2")


@pytest.fixture(scope="module")
def images(memory_root: Path) -> VisionTask:
    return make_vision_task(memory_root / "preference_images")


@pytest.fixture(scope="module")
def pairs(images: VisionTask) -> tuple[Path, Path]:
    """Rows to train on and held-out ones, with a list of files under `images`."""
    found: list[Path] = []
    for file in (images.train, images.held_out):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        columns = ("chosen", "rejected")
        trl = [{"prompt": r["input"], "images": [r["image"]], **{name: r[name] for name in columns}} for r in rows]
        found.append(write_rows(images.root / f"trl_{file.name}", trl))
    return found[0], found[1]


def words(images: VisionTask, pairs: tuple[Path, Path], run: Path, *more: str) -> list[str]:
    (images.root / "pairs.yaml").write_text("recipe: {command: dpo}\n")
    given = [
        "dpo",
        "--config",
        str(images.root / "pairs.yaml"),
        "--pretrain",
        str(images.model),
        "--prompt_data",
        str(pairs[0]),
        "--eval_data",
        str(pairs[1]),
    ]
    return [*given, "--images_key", "images", "--device", "cpu", "--save_path", str(run), *SHORT, *more]


def test_a_killed_run_on_pairs_with_images_goes_on_to_the_bit_and_the_images_count(
    server: ForkServer, images: VisionTask, pairs: tuple[Path, Path], runs: Path
) -> None:
    server.must_finish(*words(images, pairs, runs / "one"))
    kill = [("signal_at", ["dpo.logged", 2, "SIGKILL"])]
    assert server.run(*words(images, pairs, runs / "run"), preludes=kill).code == KILLED
    server.must_finish("resume", str(runs / "run"))
    assert differences(runs / "one", runs / "run") == []
    server.must_finish(*words(images, pairs, runs / "others", "--shuffle_images"))
    first, other = (read_rows(runs / name / "metrics.jsonl")[1] for name in ("one", "others"))
    assert first["dpo/chosen_logprob"] != other["dpo/chosen_logprob"], "with the images of other rows"
    assert final_checkpoint(runs / "others").name == "step_000003"


def test_pairs_with_images_are_refused_for_a_model_without_a_vision_tower(
    server: ForkServer, images: VisionTask, pairs: tuple[Path, Path], runs: Path
) -> None:
    text = runs / "text"
    server.must_finish("recipes", preludes=[("build_model", [str(text), ALPHABET])])
    given = words(images, pairs, runs / "run")
    given[given.index("--pretrain") + 1] = str(text)
    ended = server.run(*given)
    assert ended.code == 4, ended.output
    assert "model_type 'qwen2' takes no images here" in ended.output
