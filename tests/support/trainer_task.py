"""Three steps of reinforcement in a second, for tests that build a run in their own process."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft_models.tiny_models.text import build_character_model
from support.compare import differing_tensors, tensors

REWARD = '''"""More digits than signs are better; as `custom_reward_fn` of the tests."""


def digits(responses, labels):
    return [sum(letter.isdigit() for letter in response) / (1 + len(response)) for response in responses]
'''


@dataclass(frozen=True, slots=True)
class TrainerTask:
    """A model and rows on disk, and settings under the names of `rft-train rl`."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    def words(self) -> list[str]:
        """The settings as flags, with a reward from a file."""
        words = [word for name, value in self.settings.items() for word in (f"--{name}", str(value))]
        return [*words, "--reward", f"{self.folder / 'reward.py'}:digits"]


def custom_reward_fn(responses: list[str], labels: list[str]) -> list[float]:
    """The same in this process."""
    return [sum(letter.isdigit() for letter in response) / (1 + len(response)) for response in responses]


def same_model(a: Path, b: Path) -> bool:
    """Whether the last checkpoints of two runs hold the same weights to the bit."""
    return differing_tensors(*(tensors(run, "model/model.safetensors") for run in (a, b))) == []


def make_trainer_task(folder: Path) -> TrainerTask:
    """A character model of hidden size 16, six rows to train on and three held out."""
    model = build_character_model(
        folder / "model",
        alphabet="0123456789+=",
        hidden=16,
        layers=1,
        heads=2,
        ffn=16,
        max_positions=32,
        seed=0,
        init_std=0.4,
    )
    for name, numbers in (("train", range(6)), ("heldout", range(6, 9))):
        rows = [{"input": f"{n}+{n}=", "label": f"{2 * n:02d}"} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    settings = {
        "pretrain": model,
        "prompt_data": folder / "train.jsonl",
        "eval_data": folder / "heldout.jsonl",
        "device": "cpu",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "train_batch_size": 8,
        "generate_max_len": 6,
        "prompt_max_len": 8,
        "num_episodes": 2,
        "max_steps": 3,
        "actor_learning_rate": 0.01,
        "lr_schedule": "constant",
        "lr_warmup_ratio": 0.0,
    }
    return TrainerTask(folder, settings)
