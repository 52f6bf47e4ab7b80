"""A dense decoder and a mixture of experts at equal active parameters, on the same data and steps, with `rft.pretrain`.

    RFT_DATA_DIR=... python benchmarks/pretrain_mixture.py [--steps 80] [--seeds 0] [--threads 1]

The mixture (Qwen3-MoE) has 8 experts, of which a token goes to 2; the two together are as wide as the dense
feed-forward part, so that a token meets as many weights. It is trained twice, without and with `--aux_loss_coef`. All
train on the first 90 % of tinyshakespeare, byte-pair tokens, with the same windows, rate and schedule; the held-out
loss is that of the last 10 %, in nats a token. MaxVio is the load of the busiest expert over the mean load, less 1,
the mean over the layers and over the last ten steps (worst possible: 3). The last line is
`gain=<x> nats a token, mixture with balancing over dense`; see README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "pretrain_mixture.json"
SHAPE: dict[str, Any] = {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 384}
MIXTURE: dict[str, Any] = {"use_moe": True, "num_experts": 8, "top_k": 2, "ffn_hidden_size": 192}
SIDES: dict[str, dict[str, Any]] = {
    "dense": {},
    # a weight of the loss that changes nothing (1e-12 of a number of about 2), so that the loads are counted
    "mixture": MIXTURE | {"aux_loss_coef": 1e-12},
    "balanced": MIXTURE | {"aux_loss_coef": 0.01},
}
LAST = 10


def train(name: str, text: Path, seed: int, chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train one model; its held-out loss, loads and speed."""
    import rft

    ends: list[tuple[float, float]] = []

    class Watch(rft.Callback):
        def on_step(self, *_: Any) -> None:
            ends.append((time.perf_counter(), time.process_time()))

    run = rft.pretrain(
        str(text),
        save_path=str(folder / f"{name}_{seed}"),
        data_store_path=str(folder / "tokens"),
        held_out_share=0.1,
        tokenizer_size=1024,
        max_seq_len=129,
        max_steps=chosen.steps,
        max_epochs=100,
        train_batch_size=16,
        micro_train_batch_size=16,
        learning_rate=2e-3,
        seed=seed,
        device="cpu",
        eval_steps=0,
        save_interval=0,
        panel=False,
        callbacks=[Watch()],
        **(SHAPE | SIDES[name]),
    )
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    evals = [json.loads(line) for line in (run.path / "evals.jsonl").read_text().splitlines()]
    wall, cpu = (statistics.median(b[i] - a[i] for a, b in pairwise(ends)) for i in (0, 1))
    tokens = 16 * 128
    found = {
        "held_out_loss": evals[-1]["eval/loss"],
        "bits_per_byte": evals[-1]["eval/bits_per_byte"],
        "training_loss": statistics.mean(row["sft/loss"] for row in rows[-LAST:]),
        "tokens_per_second": tokens / wall,
        "tokens_per_cpu_second": tokens / cpu,
    }
    for key in ("router/max_violation", "router/max_violation_worst", "router/entropy", "router/dead_experts"):
        values = [row[key] for row in rows[-LAST:] if key in row]
        if values:
            found[key] = statistics.mean(values)
    return found


def main(argv: list[str]) -> int:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": str(chosen.threads), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    import torch

    torch.set_num_threads(chosen.threads)
    text = Path(os.environ.get("RFT_DATA_DIR", "")) / "tinyshakespeare" / "input.txt"
    if not text.is_file():
        sys.exit(f"{text} is not there: RFT_DATA_DIR names the directory that holds tinyshakespeare/input.txt")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RFT_CACHE"] = str(Path(folder) / "cache")
        for seed in chosen.seeds:
            for name in SIDES:
                row = train(name, text, seed, chosen, Path(folder))
                rows.append({"model": name, "seed": seed} | row)
                print(name, seed, {key: round(value, 4) for key, value in row.items()}, flush=True)
                arguments = {key: value for key, value in vars(chosen).items() if key != "output"}
                chosen.output.write_text(json.dumps({"arguments": arguments, "rows": rows}, indent=1) + "\n")
    losses = {name: [row["held_out_loss"] for row in rows if row["model"] == name] for name in SIDES}
    gain = min(one - other for one, other in zip(losses["dense"], losses["balanced"], strict=True))
    print(f"gain={gain:.3f} nats a token, mixture with balancing over dense, the worst of {len(chosen.seeds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
