"""A task that is learned in a second: sums of two digits below seven, a character model of hidden size 32."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from support.runs import ForkServer

ALPHABET = "0123456789+="
NUM_OPERANDS, NUM_HELD_OUT = 7, 9
SFT = """
recipe: {command: sft}
train_batch_size: 8
micro_train_batch_size: 4
max_epochs: 3
learning_rate: 3.0e-3
adam_betas: [0.9, 0.98]
l2: 0.1
lr_factors: "*layers.0.*=0.5"
eval_steps: 4
patience: 50
save_steps: 3
save_interval: 0
max_ckpt_num: 2
"""
DPO = """
recipe: {command: dpo}
train_batch_size: 8
micro_train_batch_size: 3
max_epochs: 3
learning_rate: 3.0e-3
adam_betas: [0.9, 0.98]
l2: 0.1
eval_steps: 4
patience: 50
save_steps: 3
save_interval: 0
max_ckpt_num: 2
"""
KTO = f"{DPO}loss_type: kto\ndesirable_weight: 1.5\n"
RM = """
recipe: {command: rm}
train_batch_size: 8
micro_train_batch_size: 3
max_epochs: 3
learning_rate: 3.0e-3
eval_steps: 4
save_steps: 3
save_interval: 0
max_ckpt_num: 2
"""
RL = """
recipe: {command: rl}
rollout_batch_size: 8
n_samples_per_prompt: 4
train_batch_size: 32
micro_train_batch_size: 8
micro_rollout_batch_size: 8
num_episodes: 3
max_steps: 12
generate_max_len: 4
prompt_max_len: 8
actor_learning_rate: 3.0e-4
lr_schedule: linear
adam_betas: [0.9, 0.98]
l2: 0.1
lr_factors: "*layers.0.*=0.5"
eval_steps: 5
save_steps: 3
save_interval: 0
max_ckpt_num: 2
rollout_log_interval: 2
num_trajectories_to_save: 8
"""
KL_IN_REWARD = f"{RL}init_kl_coef: 0.05\nkl_estimator: k1\n"
SEVERAL_UPDATES = f"""{RL}
max_epochs: 2
train_batch_size: 12
max_steps: 7
save_steps: 2
init_kl_coef: 0.01
use_kl_loss: true
entropy_coef: 0.001
packing_samples: true
max_tokens_per_micro_batch: 80
"""
"""Twice over the rollouts, each time in three updates of which the last is smaller, and all terms in the loss."""
SFT_WITH_TERMS = f"""{SFT}
weight_key: weight
label_smoothing: 0.05
z_loss_coef: 0.001
neftune_noise_alpha: 1
"""
"""With all terms of the loss, which not every strategy takes."""
SFT_WITH_MUON = f"{SFT}optimizer: muon\nlr_schedule: wsd\nlr_warmup_steps: 2\nlr_decay_ratio: 0.4\n"
PTX = f"""{SEVERAL_UPDATES}
ptx_coef: 0.5
pretrain_data: FOLDER/train.jsonl
"""
"""The same with demonstrations beside the rewards, whose epochs end within a batch."""
PRETRAIN = """
recipe: {command: pretrain}
hidden_size: 16
num_layers: 2
num_heads: 2
max_seq_len: 24
tokenizer: char
dropout: 0.1
text_separator: "|"
held_out_share: 0.2
train_batch_size: 5
micro_train_batch_size: 2
max_epochs: 2
learning_rate: 3.0e-3
eval_steps: 4
patience: 50
save_steps: 3
save_interval: 0
max_ckpt_num: 2
"""
"""A new decoder with dropout, on windows with several documents and documents of several windows."""
VARIANTS = {
    "rl": ("rl", RL),
    "kl_in_reward": ("rl", KL_IN_REWARD),
    "several_updates": ("rl", SEVERAL_UPDATES),
    "ptx": ("rl", PTX),
    "sft": ("sft", SFT),
    "sft_terms": ("sft", SFT_WITH_TERMS),
    "muon": ("sft", SFT_WITH_MUON),
    "dpo": ("dpo", DPO),
    "kto": ("dpo", KTO),
    "rm": ("rm", RM),
    "pretrain": ("pretrain", PRETRAIN),
}
"""Name -> (command, recipe)."""


@dataclass(frozen=True, slots=True)
class TinyTask:
    """Data, a warm model and recipes on disk."""

    folder: Path

    @property
    def model(self) -> Path:
        """A complete model directory, right about a quarter of the time."""
        return self.folder / "warm_start" / "checkpoints" / "step_000100" / "model"

    def words(self, variant: str, run: Path, *more: str) -> list[str]:
        """The command line of a run of a variant in the directory `run`; `more` are further flags."""
        command, text = VARIANTS[variant]
        return self._words(command, variant, text, self.model, run, *more)

    def warm_up(self) -> list[str]:
        """The command line that makes the model."""
        more = (
            "--max_epochs",
            "40",
            "--max_steps",
            "100",
            "--train_batch_size",
            "10",
            "--micro_train_batch_size",
            "10",
        )
        more = (*more, "--eval_steps", "0", "--save_steps", "0")
        return self._words("sft", "sft", SFT, self.folder / "untrained", self.folder / "warm_start", *more)

    def _words(self, command: str, name: str, text: str, model: Path, run: Path, *more: str) -> list[str]:
        recipe = self.folder / f"{name}.yaml"
        latest = {line.split(":")[0]: line for line in text.strip().splitlines() if line}
        recipe.write_text("\n".join(latest.values()).replace("FOLDER", str(self.folder)) + "\n")
        if command == "pretrain":
            words = [command, "--config", str(recipe), "--save_path", str(run)]
            words += ["--prompt_data", str(self.folder / "texts.txt"), "--data_store_path", str(self.folder / "tokens")]
            return [*words, *more]
        words = [command, "--config", str(recipe), "--pretrain", str(model), "--save_path", str(run)]
        words += ["--prompt_data", str(self.folder / "train.jsonl"), "--eval_data", str(self.folder / "heldout.jsonl")]
        return [*words, *more]


def _row(a: int, b: int) -> dict[str, object]:
    right = f"{a + b:02d}"
    # of unequal lengths, so that losses of whole responses see them
    wrong = f"{a + b + 1 + (a + b) % 3}"
    answers = {"label": right, "output": right, "chosen": right, "rejected": wrong}
    return {"input": f"{a}+{b}=", **answers, "weight": 1 + a / 4}


def _document(n: int) -> str:
    return f"{n} and {n + 1} are {2 * n + 1}. " * (1 + 5 * (n % 3 == 0))


def make_task(folder: Path, server: ForkServer) -> TinyTask:
    """Write the data, build the model, and warm it up by supervised training."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(NUM_OPERANDS) for b in range(NUM_OPERANDS)]
    random.Random(1).shuffle(pairs)
    for name, chosen in (("heldout", pairs[:NUM_HELD_OUT]), ("train", pairs[NUM_HELD_OUT:])):
        rows = [_row(a, b) for a, b in chosen]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "texts.txt").write_text("|".join(map(_document, range(24))))
    task = TinyTask(folder)
    server.must_finish(*task.warm_up(), preludes=[("build_model", [str(folder / "untrained"), ALPHABET])])
    server.warm_up(task.model)
    return task
