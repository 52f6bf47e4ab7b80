"""Conversations that small models can hold: a tokenizer that knows them, prompts, and environments in a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.run_lifecycle import final_model
from rft.tiny_models.quickstart import DIALOGUE_TEMPLATE, dialogue_texts
from rft_cli.commands import training
from rft_cli.config.resolve import resolve
from rft_models.tiny_models.text import build_bpe_tokenizer, build_character_tokenizer, build_decoder
from rft_trainer.tasks import calculator_dialogues
from support.vision_task import COLOURS, SIDE

TEMPLATE = DIALOGUE_TEMPLATE
OWN = '''
from rft_trainer.environments.protocol import Answer

class Echo:
    """Says back how many letters it heard; a turn with an e is worth a tenth, the third turn ends it."""

    tools = [{"type": "function", "function": {"name": "echo"}}]

    def reset(self, prompt, key):
        self.count, self.key = 0, key
        return ["go"]

    def step(self, turn):
        self.count += 1
        reward = 0.1 * ("e" in turn.text) + 0.01 * (self.key % 3)
        return Answer([str(len(turn.text))], reward=reward, done=self.count == 3)

class Broken(Echo):
    def step(self, turn):
        if self.key % 4 == 0:
            raise KeyError("lost")
        return super().step(turn)

class Painter(Echo):
    """Answers with an image, as some would."""

    def step(self, turn):
        parts = [{"type": "image", "image": "next.png"}, {"type": "text", "text": "and now?"}]
        return Answer([{"role": "user", "content": parts}])

class Colours:
    """Asks twice; a turn is worth its letters, and the words that stand for an image are only words."""

    def reset(self, prompt, key):
        self.count = 0

    def step(self, turn):
        self.count += 1
        reward = sum(map(ord, turn.text)) % 8 / 8
        return Answer(["<image> or <|image_pad|> again?"], reward=reward, done=self.count == 3)
'''


@dataclass(frozen=True, slots=True)
class TalkTask:
    """Where model, rows and environments are."""

    root: Path

    @property
    def own(self) -> Path:
        """The file of the environments."""
        return self.root / "own.py"

    @property
    def held_out(self) -> Path:
        """Rows that are not trained on."""
        return self.root / "heldout.jsonl"

    def words(self, *more: object) -> list[str]:
        """Of a run of two steps; each has four prompts and three conversations of each."""
        given = f"--pretrain {final_model(self.root / 'short')} --prompt_data {self.root}/train.jsonl "
        given += "--apply_chat_template --rollout_batch_size 4 "
        given += "--n_samples_per_prompt 3 --train_batch_size 12 --generate_max_len 36 --turn_max_len 8 --max_turns 3 "
        given += "--prompt_max_len 32 --max_steps 2 --actor_learning_rate 1e-3 --seed 3 --eval_steps 0 "
        given += "--rollout_log_interval 1"
        return [*given.split(), *map(str, more)]


def make_talk_task(root: Path, *, hidden: int = 16, heads: int = 2) -> TalkTask:
    """A model that has learned to end its turns, prompts, and environments in a file."""
    made = calculator_dialogues.calculator(0, num_demonstrations=60, num_held_out=6)
    for name, rows in (("train", made.train[:24]), ("heldout", made.held_out)):
        _write(root / f"{name}.jsonl", list(rows))
    tokenizer = build_bpe_tokenizer(dialogue_texts(made.demonstrations), 300)
    tokenizer.chat_template = TEMPLATE
    build_decoder(
        root / "model",
        tokenizer,
        hidden=hidden,
        layers=1,
        heads=heads,
        kv_heads=1,
        ffn=2 * hidden,
        max_positions=160,
        seed=0,
        init_std=0.3,
    )
    (root / "own.py").write_text(OWN)
    _write(root / "short.jsonl", [{"input": row["input"], "output": "It"} for row in made.train[:24]])
    chosen = f"--pretrain {root}/model --prompt_data {root}/short.jsonl --apply_chat_template --learning_rate 2e-2 "
    chosen += f"--train_batch_size 8 --max_steps 30 --max_epochs 20 --save_path {root}/short --save_interval 0"
    training.train(
        resolve("sft", chosen.split()), ["rft-train", "sft"], show_end=False
    )  # so that turns end by themselves
    return TalkTask(root)


@dataclass(frozen=True, slots=True)
class SeenTalkTask:
    """Conversations about an image."""

    root: Path

    def words(self, *more: object) -> list[str]:
        """Of a run of two steps."""
        given = f"--pretrain {final_model(self.root / 'short')} --prompt_data {self.root}/train.jsonl "
        given += f"--apply_chat_template --images_key image --environment {self.root}/own.py:Colours "
        given += "--rollout_batch_size 4 "
        given += "--n_samples_per_prompt 4 --train_batch_size 16 --micro_train_batch_size 16 --generate_max_len 100 "
        given += "--turn_max_len 4 --max_turns 3 --prompt_max_len 40 --max_steps 2 --actor_learning_rate 1e-3 "
        given += "--seed 3 --eval_steps 0 --rollout_log_interval 1 --num_trajectories_to_save 99 --device cpu"
        return [*given.split(), *map(str, more)]


def make_seen_talk_task(root: Path, model_type: str = "qwen2_5_vl") -> SeenTalkTask:
    """A vision-language model and squares of one colour; every third row has no image."""
    from PIL import Image

    from rft_models.tiny_models.vision import VisionSizes, build_vision_model

    sizes = VisionSizes(
        hidden=32, kv_heads=4, ffn=64, max_positions=192, vision_hidden=32, vision_ffn=32, image_size=2 * SIDE
    )
    tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz<>|_? +=0123456789:\n")
    build_vision_model(root / "model", tokenizer, model_type=model_type, sizes=sizes, seed=3, init_std=0.1)
    (root / "own.py").write_text(OWN)
    rows: list[dict[str, Any]] = []
    for number in range(12):
        name = "rgbw"[number % 4]
        Image.new("RGB", (SIDE, SIDE), COLOURS[name]).save(root / f"{number:02d}.png")
        rows.append({"input": "<image>colour?", "image": f"{number:02d}.png", "label": name, "output": name})
        if number % 2:
            rows.append({"input": f"{number % 10}+1=", "label": "r", "output": "r"})
    _write(root / "train.jsonl", rows)
    chosen = f"--pretrain {root}/model --prompt_data {root}/train.jsonl --apply_chat_template --images_key image "
    chosen += "--mixed_mm_data --learning_rate 1e-2 --train_batch_size 6 --max_steps 20 --max_epochs 20 --device cpu "
    chosen += f"--save_path {root}/short --save_interval 0"
    training.train(
        resolve("sft", chosen.split()), ["rft-train", "sft"], show_end=False
    )  # so that turns end by themselves
    return SeenTalkTask(root)


def _write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
