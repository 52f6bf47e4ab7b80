"""DPO on pairs of GSM8K solutions beside TRL's DPOTrainer: losses of every step, held-out accuracy and margin.

    uv sync --group bench
    RFT_DATA_DIR=... python benchmarks/dpo_gsm8k.py [--seeds 3] [--steps 60] [--sft_steps 60]

A pair is a correct and a wrong solution of one question, as in reward_model_gsm8k.py; no question is on both sides. A
seed draws the weights, the demonstrations that the model learns first, and the pairs. Both sides then take the same
steps from the same model: 16 pairs in micro-batches of 4, beta 0.1. Held-out pairs are compared by the rewards
beta log(pi / pi_ref) of their responses, before (all are 0) and after. The last line is
`worst_ratio=<x> against trl <version> at held-out accuracy`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reward_model_gsm8k import pairs
from stages import BATCH, COMMON, PACKED, models, ours, trl

from rft_algos.statistics import wilson_interval

RESULTS = Path(__file__).resolve().parent / "results" / "dpo_gsm8k.json"
RATE = 3e-4


def of_seed(seed: int, chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both sides from one model; their losses, accuracies and margins."""
    import rft
    from rft_trainer.data.mixture import Mixture

    train, held_out = (
        [row for row in rows if len(row["input"]) + max(len(row["chosen"]), len(row["rejected"])) < PACKED]
        for rows in pairs(seed, 4096)
    )
    held_out = held_out[: chosen.held_out]
    model, _ = models(folder, train, chosen)
    start = rft.sft(
        str(model), train, output_key="chosen", save_path=str(folder / "sft"), max_steps=chosen.sft_steps, **COMMON
    )
    warm = max((start.path / "checkpoints").glob("step_*/model"))
    rows = train[: BATCH * chosen.steps]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    data = {"eval_data": str(folder / "held_out.jsonl"), "eval_steps": chosen.steps}
    our_losses, _ = ours("dpo", warm, rows, chosen.steps, folder / "ours", learning_rate=RATE, **data)
    before, *_, after = map(json.loads, (folder / "ours" / "evals.jsonl").read_text().splitlines())
    order = Mixture([len(rows)], None).order(42, 0)
    in_order = [rows[int(index)] for index in order]
    their_losses, _ = trl("dpo", warm, in_order, chosen.steps, folder / "trl", held_out, learning_rate=RATE)
    theirs = json.loads((folder / "trl" / "evals.json").read_text())
    return {
        "losses": {"ours": our_losses, "trl": their_losses},
        "largest_difference": max(abs(a - b) / abs(b) for a, b in zip(our_losses, their_losses, strict=True)),
        "before": {"accuracy": before["eval/accuracy"], "margin": before["eval/margin"]},
        "ours": {"accuracy": after["eval/accuracy"], "margin": after["eval/margin"]},
        "trl": {"accuracy": theirs["eval_rewards/accuracies"], "margin": theirs["eval_rewards/margins"]},
    }


def main(argv: list[str]) -> int:
    """Print a line for each seed and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"seeds": 3, "steps": 60, "sft_steps": 60, "held_out": 200, "hidden": 128, "layers": 2}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    import torch

    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for seed in range(chosen.seeds):
        found.append(row := of_seed(seed, chosen, Path(tempfile.mkdtemp())))
        told = "  ".join(
            f"{side} {row[side]['accuracy']:.1%}, margin {row[side]['margin']:.4f}"
            for side in ("before", "ours", "trl")
        )
        print(f"seed {seed}: {told}  losses within {row['largest_difference']:.1e}")
    means = {side: statistics.mean(row[side]["accuracy"] for row in found) for side in ("ours", "trl")}
    num_held_out = chosen.held_out * chosen.seeds
    interval = wilson_interval(round(means["ours"] * num_held_out), num_held_out)
    around = f"{interval.low:.1%} to {interval.high:.1%}"
    print(f"held-out accuracy: ours {means['ours']:.1%} ({around}), trl {means['trl']:.1%}")
    packages = {name: version(name) for name in ("trl", "torch", "transformers", "rft")}
    RESULTS.write_text(json.dumps({"packages": packages, "arguments": vars(chosen), "seeds": found}, indent=1) + "\n")
    print(f"worst_ratio={means['ours'] / means['trl']:.3f} against trl {packages['trl']} at held-out accuracy")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
