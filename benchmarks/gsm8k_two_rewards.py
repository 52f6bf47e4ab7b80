"""GSM8K with two rewards by weight: `--reward math,format --reward_weights math=0.9,format=0.1`, and each one's curve.

    RFT_DATA_DIR=... python benchmarks/gsm8k_two_rewards.py [--folder DIR --sft_steps 300 --max_steps 120]

A tokenizer and a decoder as small as in the quick cut of the recipe gsm8k-tiny learn from solutions of the training
file. Two thirds are written as <think>solution</think><answer>\\boxed{number}</answer>, a sixth each without all tags
and without the last one, so that the form is known and not certain. `rl` then draws 8 answers to each question. The
curve of each reward is that of metrics.jsonl. See README.md. The last line is
`math <first quarter> -> <last quarter>, format <first quarter> -> <last quarter>`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "gsm8k_two_rewards.json"
RFT_TRAIN = str(Path(sys.executable).parent / "rft-train")
PARTS = ("reward/mean", "reward/math", "reward/format", "reward/format/tags")
EVALUATED = 200


def main() -> None:
    """Run the three stages, and print the curves."""
    chosen = _arguments()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(chosen.folder or made).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        trained(folder, Path(os.environ["RFT_DATA_DIR"]).resolve() / "gsm8k", chosen)
        rows = _rows(folder / "rl" / "metrics.jsonl")
        evaluations = [
            {name: value for name, value in row.items() if isinstance(value, int | float | str)}
            for row in _rows(folder / "rl" / "evals.jsonl")
        ]
    curves = {name: [row[name] for row in rows] for name in PARTS}
    arguments = {name: value for name, value in vars(chosen).items() if name != "folder"}
    record = {"arguments": arguments, "curves": curves, "evaluations": evaluations, "minutes": _minutes(rows)}
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    ends = {name: _ends(curve) for name, curve in curves.items()}
    for name, (first, last) in ends.items():
        print(f"{name:<20} {first:.4f} -> {last:.4f}")
    for row in evaluations:
        print(f"{row['name']}: reward {row['eval/reward']:.4f}, accuracy {row['eval/accuracy']:.4f}, n {row['eval/n']}")
    print(", ".join(f"{name} {_arrow(ends[f'reward/{name}'])}" for name in ("math", "format")))


def trained(folder: Path, data: Path, chosen: argparse.Namespace) -> None:
    """Run build, sft and rl."""
    demonstrations = [shown(row, number) for number, row in enumerate(_rows(data / "train.jsonl"))]
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demonstrations))
    words = f"--texts {folder}/demonstrations.jsonl --text_keys question,answer --vocab_size 2048 --max_positions 1024"
    words += " --hidden 128 --layers 2 --heads 4 --kv_heads 2 --ffn 320"
    _run("build", *words.split(), "--seed", str(chosen.seed), "--save_path", str(folder / "untrained"))
    words = f"--config gsm8k-tiny-sft --pretrain {folder}/untrained --prompt_data {folder}/demonstrations.jsonl"
    words += f" --max_steps {chosen.sft_steps} --eval_steps 0 --held_out_rows 0 --patience 0 --learning_rate 2e-3"
    _run("sft", *words.split(), "--seed", str(chosen.seed), "--save_path", str(folder / "sft"))
    [*_, policy] = sorted((folder / "sft" / "checkpoints").glob("step_*/model"))
    words = f"--config gsm8k-tiny --pretrain {policy} --prompt_data {data}/train.jsonl --eval_data {data}/test.jsonl"
    words += " --reward math,format --reward_weights math=0.9,format=0.1 --reward_workers 1"
    words += f" --rollout_batch_size 16 --train_batch_size 128 --max_steps {chosen.max_steps}"
    words += f" --max_eval_samples {EVALUATED} --actor_learning_rate 2e-4 --save_minutes 0 --log_interval 1"
    _run("rl", *words.split(), "--seed", str(chosen.seed), "--save_path", str(folder / "rl"))


def shown(row: dict[str, str], number: int) -> dict[str, str]:
    """Return a demonstration; every sixth lacks all tags, every sixth the last one."""
    solution, _, answer = row["answer"].rpartition("#### ")
    text = f"<think>{solution.strip()}</think><answer>\\boxed{{{answer.strip()}}}</answer>"
    if number % 6 == 0:
        text = f"{solution.strip()}\n\\boxed{{{answer.strip()}}}"
    elif number % 6 == 1:
        text = text.removesuffix("</answer>")
    return {"question": row["question"], "answer": text}


def _run(*words: str) -> None:
    ended = subprocess.run(
        [RFT_TRAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"rft-train {words[0]} ended with {ended.returncode}:\n{ended.stdout[-3000:]}")


def _ends(curve: list[float]) -> tuple[float, float]:
    """Return the means of the first and the last quarter."""
    part = max(1, len(curve) // 4)
    return fmean(curve[:part]), fmean(curve[-part:])


def _arrow(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.4f} -> {ends[1]:.4f}"


def _minutes(rows: list[dict[str, Any]]) -> float:
    return rows[-1]["time/elapsed"] / 60.0


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="")
    parser.add_argument("--sft_steps", type=int, default=300)
    parser.add_argument("--max_steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


if __name__ == "__main__":
    main()
