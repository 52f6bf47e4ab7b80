"""Supervised stages of this project beside TRL's trainers: same model, rows, order and batches, on a CPU in float32.

    uv sync --group bench
    RFT_DATA_DIR=... python benchmarks/stages.py [--stages sft rm dpo] [--steps 10] [--rounds 3] [--threads 1]

`sft` is `SFTTrainer` on GSM8K's solutions, `rm` `RewardTrainer` and `dpo` `DPOTrainer` on pairs of a correct and a
wrong solution of one GSM8K question. Both sides are asked for 16 rows a step in micro-batches of 4; what each makes of
a micro-batch (padding, packing, a prompt that runs once for both responses) is its own affair. `sft_packed` packs on
both sides, in micro-batches of at most 4,096 tokens, and is timed by tokens. The gate comes first: the loss of every
step agrees to 1e-3 relative (packing divides rows otherwise, and has no gate). Sides take turns; the figure is the
median of all steps, the first two of each run left out. See README.md. The last line is
`worst_ratio=<x> against trl <version> at <stage>`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from reward_model_gsm8k import pairs

RESULTS = Path(__file__).resolve().parent / "results" / "stages.json"
WARM_UP = 2
BATCH, MICRO, RATE, PACKED = 16, 4, 1e-3, 1024
Rows = list[dict[str, str]]
Steps = tuple[list[float], list[float]]
"""(loss, seconds) of every step; where rows are packed, seconds for 1,000 tokens."""
COMMON: dict[str, Any] = {
    "device": "cpu",
    "train_batch_size": BATCH,
    "learning_rate": RATE,
    "lr_schedule": "constant",
    "lr_warmup_ratio": 0.0,
    "adam_betas": (0.9, 0.999),
    "l2": 0.0,
    "max_norm": 1.0,
    "eval_steps": 0,
    "save_interval": 0,
    "panel": False,
}
THEIRS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_accumulation_steps": BATCH // MICRO,
    "per_device_train_batch_size": MICRO,
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def ours(stage: str, model: Path, rows: Rows, steps: int, folder: Path, **settings: Any) -> Steps:
    """Train with `rft.sft`, `rft.reward_model` or `rft.dpo`."""
    import rft

    command = {"sft": rft.sft, "sft_packed": rft.sft, "rm": rft.reward_model, "dpo": rft.dpo}[stage]
    more: dict[str, Any] = {"micro_train_batch_size": MICRO}
    if stage == "sft_packed":
        more = {"packing_samples": True, "max_tokens_per_micro_batch": MICRO * PACKED}
    if stage.startswith("sft"):
        more |= {"output_key": "chosen"}
    run = command(str(model), rows, save_path=str(folder), max_steps=steps, **(COMMON | more | settings))  # type: ignore[operator]
    found = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    name = f"{stage.removesuffix('_packed')}/loss"
    seconds = [row["time/train"] for row in found]
    if stage == "sft_packed":
        seconds = _by_thousand(seconds, [row["data/tokens"] for row in found])
    return [row[name] for row in found], seconds


def trl(
    stage: str, model: Path, rows: Rows, steps: int, folder: Path, held_out: Rows | None = None, **settings: Any
) -> Steps:
    """Train with TRL's trainer of the stage, on the rows in this order; held-out metrics go to `folder`/evals.json."""
    import trl as library
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

    losses: list[float] = []
    seconds: list[float] = []
    tokens: list[float] = []

    class Watch(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))
                tokens.append(float(logs.get("num_tokens", 0)))

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    given = THEIRS | {"output_dir": str(folder), "max_steps": steps} | settings
    if stage.startswith("sft"):
        base, columns = library.SFTTrainer, {"prompt": "input", "completion": "chosen"}
        given |= {"max_length": PACKED, "packing": stage == "sft_packed", "completion_only_loss": True}
        if stage == "sft_packed":
            given |= {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": 1}
        config = library.SFTConfig(**given)
    elif stage == "rm":
        base, columns = library.RewardTrainer, {"prompt": "input", "chosen": "chosen", "rejected": "rejected"}
        config = library.RewardConfig(**given, max_length=PACKED)
    else:
        base, columns = library.DPOTrainer, {"prompt": "input", "chosen": "chosen", "rejected": "rejected"}
        config = library.DPOConfig(**given, max_length=PACKED, beta=0.1, precompute_ref_log_probs=True)

    class InOrder(base):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    loader = AutoModelForSequenceClassification if stage == "rm" else AutoModelForCausalLM
    loaded = loader.from_pretrained(model)
    loaded.config.pad_token_id = tokenizer.pad_token_id
    data, apart = (
        Dataset.from_list([{name: row[key] for name, key in columns.items()} for row in part])
        for part in (rows, held_out or rows[:MICRO])
    )
    trainer = InOrder(
        model=loaded,
        args=config,
        train_dataset=data,
        eval_dataset=apart,
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.train()
    if held_out:
        (folder / "evals.json").write_text(json.dumps(trainer.evaluate()))
    if stage == "sft_packed":
        seconds = _by_thousand(seconds, tokens)
    return losses, seconds


def _by_thousand(seconds: list[float], tokens: list[float]) -> list[float]:
    """Seconds for 1,000 tokens of every step; `tokens` count from the start."""
    return [
        1000 * taken / (now - before) for taken, (before, now) in zip(seconds, pairwise([0.0, *tokens]), strict=True)
    ]


def compare(stage: str, model: Path, rows: Rows, chosen: argparse.Namespace, folder: Path) -> dict[str, float | None]:
    """Pass the gate, then take turns; the medians of both sides, and their ratio."""
    from rft_trainer.data.mixture import Mixture

    order = [int(index) for index in Mixture([len(rows)], None).order(42, 0)]
    sides: dict[str, Callable[[Path], Steps]] = {
        "ours": lambda path: ours(stage, model, rows, chosen.steps, path),
        "trl": lambda path: trl(stage, model, [rows[i] for i in order], chosen.steps, path),
    }
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    apart: float | None = None  # rows are packed otherwise: no gate
    for turn in range(chosen.rounds):
        losses = {}
        for name, run in sides.items():
            losses[name], taken = run(folder / f"{name}_{turn}")
            seconds[name] += taken[WARM_UP:]
        if turn == 0 and stage != "sft_packed":
            apart = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(losses["ours"], losses["trl"], strict=True))
            if apart > 1e-3:
                sys.exit(f"gate of {stage}: {losses}")
    one, other = (statistics.median(seconds[name]) for name in ("ours", "trl"))
    return {"ours": one, "trl": other, "ratio": other / one, "largest_difference": apart}


def models(folder: Path, rows: Rows, chosen: argparse.Namespace) -> tuple[Path, Path]:
    """(language model, reward model) with a byte-pair tokenizer of the rows."""
    import rft
    from rft_cli.main import main as rft_train

    (folder / "texts.txt").write_text("\n".join(row["input"] + row["chosen"] for row in rows))
    sizes = {"hidden": chosen.hidden, "layers": chosen.layers, "vocab_size": 1024, "max_positions": PACKED}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    assert rft_train(["build", "--texts", str(folder / "texts.txt"), "--save_path", str(folder / "model"), *words]) == 0
    (folder / "model" / "chat_template.jinja").unlink()  # rows of plain text; a reward model would render them as turns
    made = rft.reward_model(
        str(folder / "model"),
        rows[:16],
        save_path=str(folder / "rm"),
        max_steps=1,
        **(COMMON | {"learning_rate": 1e-12}),
    )
    return folder / "model", next((made.path / "checkpoints").glob("step_*/model"))


def main(argv: list[str]) -> int:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", default=["sft", "sft_packed", "rm", "dpo"])
    for name, value in {"steps": 10, "rounds": 3, "threads": 1, "hidden": 192, "layers": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": str(chosen.threads), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    import torch

    torch.set_num_threads(chosen.threads)
    folder = Path(tempfile.mkdtemp())
    rows, _ = pairs(0, 4096)
    rows = [row for row in rows if len(row["input"]) + max(len(row["chosen"]), len(row["rejected"])) < PACKED]
    model, reward_model = models(folder, rows, chosen)
    found: dict[str, dict[str, Any]] = {}
    for stage in chosen.stages:
        count = BATCH * chosen.steps * (6 if stage == "sft_packed" else 1)
        start = reward_model if stage == "rm" else model
        found[stage] = row = compare(stage, start, rows[:count], chosen, folder / stage)
        print(f"{stage:<10} ours {row['ours']:.3f} s  trl {row['trl']:.3f} s  ratio {row['ratio']:.2f}")
    packages = {name: version(name) for name in ("trl", "torch", "transformers", "rft")}
    RESULTS.write_text(json.dumps({"packages": packages, "arguments": vars(chosen), "stages": found}, indent=1) + "\n")
    worst = min(found, key=lambda stage: found[stage]["ratio"])
    print(f"worst_ratio={found[worst]['ratio']:.2f} against trl {packages['trl']} at {worst}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
