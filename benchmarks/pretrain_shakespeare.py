"""`rft-train pretrain --config shakespeare-char` beside a decoder in plain torch (peers/small_gpt.py), for equal times.

    RFT_DATA_DIR=... python benchmarks/pretrain_shakespeare.py [--minutes 3 5] [--seeds 0 1 2] [--threads 2]

Both sides train on the first 90 % of tinyshakespeare's characters and are scored on every character of the last 10 %
but its first. A side is given so many minutes of optimizer steps: what starts the program, evaluates and saves is left
out on both sides. How many steps these are is measured first, by a short run that is thrown away, so that the schedule
ends with the time. The sides run one after the other. The last line is
`gain=<x> nats in the worst of <n>`; see README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "pretrain_shakespeare.json"
TRIED = 40
"""Steps of the run that measures the speed; the first ten are left out."""


def train(folder: Path, text: Path, steps: int, seed: int, threads: int) -> list[dict[str, Any]]:
    """Train by the recipe in a process of its own; the rows of metrics.jsonl."""
    words = ["pretrain", "--config", "shakespeare-char", "--prompt_data", str(text), "--seed", str(seed)]
    words += ["--max_steps", str(steps), "--save_path", str(folder), "--eval_steps", "0", "--log_interval", "100"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "rft_cli.main", *words], env=environment, stdout=log, stderr=log, check=True
        )
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def ours(text: Path, seconds: float, seed: int, threads: int) -> dict[str, float]:
    """Measure the speed, train for the time, and read the held-out loss of the end."""
    with tempfile.TemporaryDirectory() as folder:
        tried = train(Path(folder) / "tried", text, TRIED, seed, threads)[10:]
        a_step = sum(row["time/step"] for row in tried) / len(tried)
        rows = train(Path(folder) / "run", text, int(seconds / a_step), seed, threads)
        last = json.loads((Path(folder) / "run" / "evals.jsonl").read_text().splitlines()[-1])
    taken = sum(row["time/step"] - row["time/eval"] - row["time/save"] for row in rows)
    tokens = sum(row["time/tokens_per_second"] * row["time/step"] for row in rows)
    return {
        "steps": len(rows),
        "seconds": taken,
        "validation_loss": last["eval/loss"],
        "tokens_per_second": tokens / taken,
    }


def peer(text: Path, seconds: float, seed: int, threads: int) -> dict[str, float]:
    """Run the plain decoder."""
    words = [str(text), "--seconds", str(seconds), "--seed", str(seed), "--threads", str(threads)]
    ended = subprocess.run(
        [sys.executable, str(HERE / "peers" / "small_gpt.py"), *words],
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout.splitlines()[-1])


def main(argv: list[str]) -> int:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, nargs="+", default=[3.0, 5.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args(argv)
    data = os.environ.get("RFT_DATA_DIR", "")
    text = Path(data) / "tinyshakespeare" / "input.txt"
    if not text.is_file():
        sys.exit(f"{text} is not there: RFT_DATA_DIR names the directory that holds tinyshakespeare/input.txt")
    rows: list[dict[str, Any]] = []
    for minutes in chosen.minutes:
        for seed in chosen.seeds:
            row: dict[str, Any] = {"minutes": minutes, "seed": seed}
            for name, side in (("ours", ours), ("peer", peer)):
                row[name] = side(text, 60 * minutes, seed, chosen.threads)
            rows.append(row)
            first, second = row["ours"], row["peer"]
            print(
                f"{minutes:g} min seed {seed}: ours {first['validation_loss']:.4f} ({first['steps']:,} steps, "
                f"{first['tokens_per_second']:,.0f} tokens/s, {first['seconds']:.0f} s)  peer "
                f"{second['validation_loss']:.4f} ({second['steps']:,} steps, {second['tokens_per_second']:,.0f} "
                f"tokens/s, {second['seconds']:.0f} s)",
                flush=True,
            )
            RESULTS.write_text(json.dumps({"arguments": vars(chosen), "rows": rows}, indent=1) + "\n")
    gain = min((row["peer"]["validation_loss"] - row["ours"]["validation_loss"] for row in rows), default=math.nan)
    print(f"gain={gain:.3f} nats in the worst of {len(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
