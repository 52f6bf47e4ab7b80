"""A task that is learned in a second: sums of two digits below seven, a character model of hidden size 32."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rft_algos.keyed_random import derive_key, permutation
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
eval_steps: 4
patience: 50
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
eval_steps: 5
save_steps: 3
save_interval: 0
max_ckpt_num: 2
rollout_log_interval: 2
num_trajectories_to_save: 8
"""
KL_IN_REWARD = RL + "init_kl_coef: 0.05\nkl_estimator: k1\n"
SEVERAL_UPDATES = RL + (
    "max_epochs: 2\ntrain_batch_size: 12\ninit_kl_coef: 0.01\nuse_kl_loss: true\nentropy_coef: 0.001\n"
    "packing_samples: true\nmax_tokens_per_micro_batch: 40\n"
)


@dataclass(frozen=True, slots=True)
class TinyTask:
    """Data, a warm model and recipes on disk."""

    folder: Path

    @property
    def model(self) -> Path:
        """A complete model directory, right about a third of the time."""
        return self.folder / "model"

    def recipe(self, name: str, text: str) -> Path:
        """`text` as a recipe file; a later line of a name replaces an earlier one."""
        lines: dict[str, str] = {}
        for line in text.strip().splitlines():
            lines[line.split(":")[0]] = line
        path = self.folder / f"{name}.yaml"
        path.write_text("\n".join(lines.values()) + "\n")
        return path

    def words(self, command: str, recipe: Path, run: Path, *more: str) -> list[str]:
        """The command line of a run in the directory `run`."""
        words = [command, "--config", str(recipe), "--pretrain", str(self.model), "--save_path", str(run)]
        words += ["--prompt_data", str(self.folder / "train.jsonl"), "--eval_data", str(self.folder / "heldout.jsonl")]
        return [*words, *more]


def make_task(folder: Path, server: ForkServer) -> TinyTask:
    """Write the data, build the model, and warm it up by supervised training."""
    from rft_models.build import build_character_model

    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(NUM_OPERANDS) for b in range(NUM_OPERANDS)]
    order = permutation(derive_key(0, "tiny-task"), len(pairs)).tolist()
    for name, places in (("heldout", order[:NUM_HELD_OUT]), ("train", order[NUM_HELD_OUT:])):
        rows = [{"input": f"{a}+{b}=", "label": f"{a + b:02d}", "output": f"{a + b:02d}"} for a, b in map(pairs.__getitem__, places)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_character_model(
        folder / "untrained", alphabet=ALPHABET, hidden=32, layers=2, heads=2, ffn=64, max_positions=64, seed=1
    )
    task = TinyTask(folder)
    warm = task.recipe("warm", SFT)
    words = task.words("sft", warm, folder / "warm_start", "--max_epochs", "40", "--max_steps", "100", "--train_batch_size", "10")
    words[words.index("--pretrain") + 1] = str(folder / "untrained")
    server.must_finish(*words, "--micro_train_batch_size", "10", "--eval_steps", "0", "--save_steps", "0")
    (folder / "model").symlink_to(folder / "warm_start" / "checkpoints" / "step_000100" / "model")
    return task
