"""`rft-train plan` with images: tokens as the run would count them, a remedy that works, and the tower's memory."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rft.build.images import tokenizer_with_images
from rft.build.prompt_data import renderer_for
from rft.planning.image_tokens import ImagePlan, image_plan
from rft.planning.vision_memory import activation_term, weight_terms
from rft_cli.commands import plan
from rft_cli.config.resolve import resolve
from rft_cli.pages.plan import image_lines
from rft_core.errors import DataError, OptionsError
from rft_dist.planning.memory_estimate import TrainingMemoryConfig
from rft_dist.settings import StrategySettings
from rft_dist.strategies.registry import run_dims, run_layout
from rft_models.files.vision_tower_sizes import TowerSizes
from rft_models.tiny_models.text import build_character_model, build_character_tokenizer
from rft_models.tiny_models.vision import VisionSizes, build_vision_model
from rft_trainer.data.images import ImageColumn
from rft_trainer.data.prompts import prompts_from_rows
from rft_trainer.data.readers.formats import read_rows


def png(width: int, height: int) -> bytes:
    """A white image."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress((b"\0" + b"\xff" * width) * height)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


@dataclass(frozen=True, slots=True)
class Bench:
    """A model with features of 8 x 8 pixels that scales images to at most 32 x 32, and rows with images."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    def words(self, *more: object) -> list[str]:
        """Of an RL run."""
        given = ["--pretrain", self.model, "--prompt_data", self.root / "rows.jsonl", "--images_key", "image"]
        given += ["--mixed_mm_data", "--generate_max_len", 4, "--device", "cpu", "--init_kl_coef", 0]
        return list(map(str, [*given, *more]))

    def plan(self, *more: object) -> ImagePlan | None:
        settings = resolve("rl", self.words(*more)).settings
        return image_plan(settings, limit=settings.sampling.prompt_max_len, limit_flag="--prompt_max_len")

    def lengths(self, *more: object) -> list[int]:
        """Tokens of every prompt as a run renders it."""
        settings = resolve("rl", self.words(*more)).settings
        tokenizer = tokenizer_with_images(settings.model, settings.images)
        rows = prompts_from_rows(
            read_rows(settings.data.prompt_data), source="s", input_key="input", images=ImageColumn("image", mixed=True)
        )
        return [len(renderer_for(settings.data, tokenizer).render(row).token_ids) for row in rows]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("planned")
    sizes = VisionSizes(hidden=32, kv_heads=4, ffn=64, max_positions=96, vision_hidden=32, vision_ffn=48, image_size=32)
    tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz? +=0123456789:\n")
    build_vision_model(root / "model", tokenizer, sizes=sizes, seed=3)
    for width, height in ((16, 16), (64, 64), (24, 8)):
        (root / f"{width}.png").write_bytes(png(width, height))
    rows: list[dict[str, Any]] = [{"input": "<image>what?", "image": "16.png", "label": "a"} for _ in range(6)]
    rows += [
        {"input": "<image>or<image>?", "image": ["64.png", "24.png"], "label": "b"},
        {"input": "1+1=", "label": "2"},
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Bench(root)


def test_tokens_are_those_that_the_run_counts(bench: Bench) -> None:
    found = bench.plan("--prompt_max_len", 64)
    assert found is not None
    assert (found.num_rows, found.num_sampled, found.num_images) == (8, 8, 8)
    assert (found.images_a_row, found.pixels) == ((1, 2), (24 * 8, 64 * 64))
    assert found.tokens_a_row == (4, pytest.approx((6 * 4 + 16 + 3) / 7), 16 + 3)
    assert found.longest == max(bench.lengths())
    assert found.longest_row.endswith("rows.jsonl:7:image[0]")
    assert (found.too_long, found.too_many, found.unreadable, found.remedy) == (0, 0, 0, "")
    assert image_lines(found)[0].startswith(
        "8 of 8 rows looked at, headers alone: 8 images, 1 to 2 a row, 192 to 4,096 pixels"
    )


def test_the_remedy_is_the_largest_cap_with_which_no_row_is_left_out(bench: Bench) -> None:
    found = bench.plan("--prompt_max_len", 22)
    assert found is not None
    assert found.too_long == sum(length > 22 for length in bench.lengths()) == 1
    words = found.remedy.split(" or ")[0].split()
    assert words[0] == "--max_pixels"
    assert max(bench.lengths(*words)) <= 22
    larger = ["--max_pixels", int(words[1]) + 64, *words[2:]]
    assert max(bench.lengths(*larger)) > 22
    assert found.remedy.endswith(f" or --prompt_max_len {max(bench.lengths())}")
    assert any("left out, longer than 22 tokens: 1 of these rows" in line for line in image_lines(found))


def test_where_no_cap_helps_the_limit_is_the_remedy(bench: Bench) -> None:
    found = bench.plan("--prompt_max_len", 3)
    assert found is not None
    assert found.remedy == f"--prompt_max_len {max(bench.lengths())}"


def test_rows_that_would_be_refused_are_counted(bench: Bench, tmp_path: Path) -> None:
    found = bench.plan("--limit_mm_image_per_prompt", 1)
    assert found is not None
    assert (found.too_many, found.most_images) == (1, 2)
    assert image_lines(found)[-1].endswith("--limit_mm_image_per_prompt 2")
    (tmp_path / "long.png").write_bytes(png(2000, 3))
    (tmp_path / "16.png").write_bytes(png(16, 16))
    rows = [{"input": "<image>?", "image": name} for name in ("long.png", "16.png")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = bench.plan("--prompt_data", tmp_path / "rows.jsonl")
    assert found is not None
    assert found.unreadable == 1
    assert found.first_unreadable.endswith("rows.jsonl:1:image")


def test_a_bad_image_is_the_error_of_the_start(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "<image>?", "image": "gone.png"}) + "\n")
    with pytest.raises(DataError) as caught:
        bench.plan("--prompt_data", tmp_path / "rows.jsonl")
    assert caught.value.problem.code == "data.image_file"


def test_the_plan_is_printed_and_told_to_programs(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.run(["rl", *bench.words("--prompt_max_len", 22)]) == 0
    printed = capsys.readouterr().out
    assert "images       8 of 8 rows looked at" in printed
    assert "tower activations" in printed
    assert "parameters more are the vision tower's" in printed
    assert plan.run(["rl", *bench.words(), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["images"]["tokens_a_row"][2] == 19
    names = [term["name"] for term in told["memory"]]
    assert [name for name in names if name.startswith("tower")] == [
        "tower parameters",
        "tower gradients",
        "tower moments",
        "tower activations",
    ]
    assert plan.run(["rl", *bench.words("--freeze_prefix", "visual"), "--json"]) == 0
    names = [term["name"] for term in json.loads(capsys.readouterr().out)["memory"]]
    assert [name for name in names if name.startswith("tower")] == ["tower parameters"]


@pytest.mark.parametrize("absent", ["data", "processor"])
def test_what_is_on_other_machines_is_told(
    bench: Bench, tmp_path: Path, absent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = bench.words("--json")
    if absent == "data":
        words += ["--prompt_data", "elsewhere.jsonl"]
    else:
        (tmp_path / "bare").mkdir()
        shutil.copyfile(bench.model / "config.json", tmp_path / "bare" / "config.json")
        words += ["--pretrain", str(tmp_path / "bare")]
    assert plan.run(["rl", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["images"] is None
    assert any(note.startswith("images are not counted: ") for note in told["notes"])
    assert "tower parameters" in [term["name"] for term in told["memory"]]


def test_a_model_of_text_is_refused_as_at_the_start(bench: Bench, tmp_path: Path) -> None:
    model = build_character_model(tmp_path / "text", hidden=16, layers=1, heads=2, ffn=16)
    with pytest.raises(DataError) as caught:
        plan.run(["rl", *bench.words("--pretrain", model)])
    assert caught.value.problem.code == "vision.other_model"
    with pytest.raises(OptionsError) as refused:
        plan.run(["rl", *bench.words("--judge_pretrain", model)])
    assert refused.value.problem.code == "reward.no_images"


TOWER = TowerSizes(parameters=1000, layers=3, hidden=8, ffn=16, heads=2, patches_per_token=4)


def test_the_towers_bytes_are_those_of_a_hand_calculation() -> None:
    blocks = StrategySettings(fsdp=True)
    layout = run_layout(blocks, run_dims(blocks, 4))
    run = TrainingMemoryConfig(layout=layout, weight_bytes=4, reference=True, average=True)
    found = {term.name: term.num_bytes for term in weight_terms(TOWER, run, trained=True)}
    assert found == {
        "tower parameters": 1000,
        "tower of the reference": 1000,
        "tower gradients": 1000,
        "tower moments": 3000,
    }
    alone = {
        term.name: term.num_bytes for term in weight_terms(TOWER, TrainingMemoryConfig(weight_bytes=2), trained=False)
    }
    assert alone == {"tower parameters": 2000}
    block = 4 * (6 * 8 + 4 * 8 + 5 * 8 + 5 * 16) + 16 * 8
    assert activation_term(TOWER, TrainingMemoryConfig(), 10).num_bytes == 40 * 3 * block
    again = activation_term(TOWER, TrainingMemoryConfig(recomputes=True), 10)
    assert again.num_bytes == 40 * (3 * 8 * 4 + block)
