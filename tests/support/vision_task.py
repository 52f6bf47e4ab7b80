"""A vision-language model of 30,000 weights and squares of one colour whose name is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tiny_models.vision import VisionSizes, build_vision_model

COLOURS = {"r": (220, 30, 30), "g": (30, 180, 30), "b": (30, 30, 220), "w": (250, 250, 250)}
SIDE = 16
REWARD = """def letters(responses, labels):
    return [sum(map(ord, response)) % 8 / 8 for response in responses]
"""


@dataclass(frozen=True, slots=True)
class VisionTask:
    """Where model and rows are."""

    root: Path
    model: Path
    train: Path
    mixed: Path
    held_out: Path
    front: Path
    """Rows that say nothing of the place of their image."""

    def words(self, *more: object, data: Path | None = None) -> list[str]:
        """Flags that all runs share."""
        given = ["--pretrain", self.model, "--prompt_data", data or self.train, "--images_key", "image"]
        given += ["--device", "cpu", "--lr_schedule", "constant", "--lr_warmup_ratio", "0", *more]
        return list(map(str, given))

    def rl_words(self, *more: object, data: Path | None = None) -> list[str]:
        """Of a reinforcement run of two steps."""
        return [
            *self.words("--rollout_batch_size", 4, "--n_samples_per_prompt", 4, "--train_batch_size", 16, data=data),
            *("--micro_train_batch_size", "16", "--actor_learning_rate", "1e-3", "--generate_max_len", "2"),
            *("--prompt_max_len", "32", "--max_steps", "2", "--eval_steps", "0"),
            *("--reward", f"{self.root}/reward.py:letters"),
            *map(str, more),
        ]


def make_vision_task(root: Path, model_type: str = "qwen2_5_vl") -> VisionTask:
    """Model, 32 rows to train on, 16 held out, and rows of which every third is text alone."""
    root.mkdir(exist_ok=True)
    sizes = VisionSizes(
        hidden=32, kv_heads=4, ffn=64, max_positions=48, vision_hidden=32, vision_ffn=32, image_size=2 * SIDE
    )
    (root / "reward.py").write_text(REWARD)
    tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz? +=0123456789:\n")
    model = build_vision_model(root / "model", tokenizer, model_type=model_type, sizes=sizes, seed=3, init_std=0.1)
    rows = [_row(root, number) for number in range(48)]
    text = [{"input": f"{n % 10}+1=", "label": "r", "output": "r", "chosen": "r", "rejected": "g"} for n in range(16)]
    mixed = [row for n in range(16) for row in (rows[2 * n], rows[2 * n + 1], text[n])]
    return VisionTask(
        root,
        model,
        write_rows(root / "train.jsonl", rows[:32]),
        write_rows(root / "mixed.jsonl", mixed),
        write_rows(root / "heldout.jsonl", rows[32:]),
        write_rows(root / "front.jsonl", [{**row, "input": "colour?"} for row in rows[:6]]),
    )


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _row(root: Path, number: int) -> dict[str, Any]:
    from PIL import Image

    name = "rgbw"[number % 4]
    shade = tuple(max(0, min(255, value + (number * 7) % 21 - 10)) for value in COLOURS[name])
    file = root / f"{number:02d}.png"
    Image.new("RGB", (SIDE, SIDE), shade).save(file)
    pair = {"chosen": name, "rejected": "rgbw"[(number + 1) % 4]}
    return {"input": "<image>colour?", "image": file.name, "label": name, "output": name, **pair}
