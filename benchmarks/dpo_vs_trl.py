"""A run of DPO of this project beside TRL's DPOTrainer: same model, pairs and order, on a CPU in float32.

    uv sync --group bench
    python benchmarks/dpo_vs_trl.py [--steps 8] [--threads 1] [--losses sigmoid ipo ...]

The gate comes first: the loss of every step agrees to 1e-3 relative. Then the seconds of the steps are compared, the
first two left out. The last line is `worst_ratio=<x> against trl <version> at <case>`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "dpo_vs_trl.json"
WARM_UP = 2
BATCH, MICRO, RATE = 16, 4, 1e-3
LOSSES = ("sigmoid", "ipo", "hinge", "apo_zero", "nca_pair", "robust")
NOISE = {"robust": 0.1}


def pairs(count: int) -> list[dict[str, str]]:
    """Sums with right and wrong answers, of unequal lengths."""
    rows: list[dict[str, str]] = []
    for number in range(count):
        a, b = 3 + number % 37, 5 + number % 23
        said = f"{a}plus{b}is{a + b},whichis{'even' if (a + b) % 2 == 0 else 'odd'}."
        # without spaces: transformers loads the tokenizer as Qwen2's, which drops what is not in its vocabulary
        rows.append({"prompt": f"Whatis{a}+{b}?", "chosen": said, "rejected": f"Itis{a + b + 1 + number % 3}"})
    return rows


def ours(
    model: Path, rows: list[dict[str, str]], loss: str, steps: int, folder: Path
) -> tuple[list[float], list[float]]:
    """(loss, seconds) of every step of `rft.dpo`."""
    import rft

    run = rft.dpo(
        model,
        rows,
        save_path=str(folder / "ours"),
        device="cpu",
        loss_type=loss,  # type: ignore[arg-type]
        label_smoothing=NOISE.get(loss, 0.0),
        train_batch_size=BATCH,
        micro_train_batch_size=MICRO,
        max_steps=steps,
        learning_rate=RATE,
        lr_schedule="constant",
        lr_warmup_ratio=0.0,
        adam_betas=(0.9, 0.999),
        l2=0.0,
        max_norm=1.0,
        eval_steps=0,
        save_interval=0,
        panel=False,
    )
    found = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [row["dpo/loss"] for row in found], [row["time/train"] for row in found]


def trl(
    model: Path, rows: list[dict[str, str]], loss: str, steps: int, folder: Path
) -> tuple[list[float], list[float]]:
    """(loss, seconds) of every step of `DPOTrainer`, which is given the rows in our order."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    losses: list[float] = []
    seconds: list[float] = []

    class Watch(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    config = DPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        loss_type=[loss],
        label_smoothing=NOISE.get(loss, 0.0),
        beta=0.1,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=BATCH // MICRO,
        max_steps=steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        precompute_ref_log_probs=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.train()
    return losses, seconds


def main(argv: list[str]) -> int:
    """Build the model, pass the gate, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--losses", nargs="+", default=list(LOSSES))
    arguments = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": str(arguments.threads), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    import torch

    from rft_models.tiny_models.text import build_character_model
    from rft_trainer.data.mixture import Mixture

    torch.set_num_threads(arguments.threads)
    folder = Path(tempfile.mkdtemp())
    model = folder / "model"
    alphabet = "".join(sorted({character for row in pairs(400) for text in row.values() for character in text}))
    build_character_model(model, alphabet=alphabet, hidden=128, layers=4, heads=4, ffn=384, seed=0)
    rows = pairs(BATCH * arguments.steps)
    order = [int(index) for index in Mixture([len(rows)], None).order(42, 0)]
    found: dict[str, Any] = {}
    for loss in arguments.losses:
        our_losses, our_seconds = ours(model, rows, loss, arguments.steps, folder / loss)
        their_losses, their_seconds = trl(model, [rows[i] for i in order], loss, arguments.steps, folder / loss)
        apart = [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(our_losses, their_losses, strict=True)]
        if max(apart) > 1e-3:
            print(f"gate of {loss}: {our_losses} and {their_losses}")
            return 1
        one, other = (statistics.median(seconds[WARM_UP:]) for seconds in (our_seconds, their_seconds))
        found[loss] = {"ours": one, "trl": other, "ratio": other / one, "largest_difference": max(apart)}
        print(
            f"{loss:<10} ours {one:.3f} s  trl {other:.3f} s  ratio {other / one:.2f}  losses within {max(apart):.1e}"
        )
    packages = {name: version(name) for name in ("trl", "torch", "transformers", "rft")}
    record = {"packages": packages, "threads": arguments.threads, "steps": arguments.steps, "cases": found}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    worst = min(found, key=lambda loss: found[loss]["ratio"])
    print(f"worst_ratio={found[worst]['ratio']:.2f} against trl {packages['trl']} at {worst}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
