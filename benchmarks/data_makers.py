"""Chains of commands that make their own data, on additions of two-digit numbers: what each gains.

    python benchmarks/data_makers.py [--folder DIR --seed 0 --prompts 2000 --rounds 2]

A decoder of half a million weights is warmed up as in `rft-train quickstart`. Then, all from its sampled answers to
training prompts: rejection sampling (`eval`, `rollouts --export demonstrations`, `sft`); rounds of iterated DPO
(`eval`, `rollouts --export pairs`, `dpo`), each from the model of the round before; and best of n, for which `rm` makes
a reward model of the pairs, whose choice among n held-out answers is compared with chance, the vote of most and the
best possible one. Held-out sums are in no training file. The commands are those of docs/rollouts.md. The last line is
`rejection <before> -> <after>, dpo <before> -> ... -> <after>, picked@8 <x> beside maj@8 <y> and pass@8 <z>`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rft.tiny_models.quickstart import write_additions
from rft_core.keyed_random import derive_key, permutation

RESULTS = Path(__file__).resolve().parent / "results" / "data_makers.json"
RFT_TRAIN = str(Path(sys.executable).parent / "rft-train")
SAMPLES = 8
LENGTH = "--generate_max_len 5 --prompt_max_len 16"


def main() -> None:
    """Run the chains and print the figures."""
    chosen = _arguments()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(chosen.folder or made).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        record = measured(folder, chosen)
    arguments = {name: value for name, value in vars(chosen).items() if name != "folder"}
    RESULTS.write_text(json.dumps({"arguments": arguments, **record}, indent=2) + "\n")
    for name, found in record["held_out"].items():
        low, high = found["intervals"]["accuracy"]
        print(f"{name:<16} accuracy at temperature 1 {found['metrics']['eval/accuracy']:.4f} ({low:.4f} to {high:.4f})")
    picked = record["held_out"]["warm start"]
    for name, (low, high) in picked["intervals"].items():
        if "@" in name and not name.startswith("best"):
            print(f"{name:<16} {picked['metrics'][f'eval/{name}']:.4f} ({low:.4f} to {high:.4f})")
    accuracy = {name: found["metrics"]["eval/accuracy"] for name, found in record["held_out"].items()}
    rounds = [accuracy["warm start"], *(accuracy[f"dpo round {number + 1}"] for number in range(chosen.rounds))]
    at = {name: picked["metrics"][f"eval/{name}@{SAMPLES}"] for name in ("picked", "maj", "pass")}
    print(
        f"rejection {rounds[0]:.4f} -> {accuracy['rejection']:.4f}, dpo {' -> '.join(f'{one:.4f}' for one in rounds)}, "
        f"picked@{SAMPLES} {at['picked']:.4f} beside maj@{SAMPLES} {at['maj']:.4f} and pass@{SAMPLES} {at['pass']:.4f}"
    )


def measured(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run the chains; return held-out figures by the name of the model, and the numbers of rows that were made."""
    write_additions(folder, chosen.seed)
    # the file is sorted by the first number: its beginning is no sample of it
    rows = (folder / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    order = permutation(derive_key(chosen.seed, "prompts"), len(rows)).tolist()[: chosen.prompts]
    (folder / "prompts.jsonl").write_text("".join(rows[index] for index in order))
    model = trained(folder, "warm", "sft", "--config quickstart-sft", folder / "untrained", "data/train.jsonl", chosen)
    answer(folder, model, "answers", chosen)
    made = {
        "right": export(folder, "answers", "right", "demonstrations --reward_min 1"),
        "pairs": export(folder, "answers", "pairs", "pairs"),
    }
    settings = (
        f"--train_batch_size 64 --micro_train_batch_size 64 --max_len 32 --learning_rate {chosen.rm_learning_rate}"
    )
    judge = trained(folder, "judge", "rm", f"{settings} --max_epochs {chosen.rm_epochs}", model, "pairs.jsonl", chosen)
    picks = ["--reward_pretrain", f"picker={judge}", "--reward_weights", "correctness=1", "--eval_pick", "picker"]
    found = {"warm start": held_out(folder, model, "warm", chosen, *picks)}
    settings = "--train_batch_size 64 --micro_train_batch_size 64 --learning_rate 1e-3 --max_epochs 2"
    better = trained(folder, "rejection", "sft", settings, model, "right.jsonl", chosen)
    found["rejection"] = held_out(folder, better, "rejection", chosen)
    for number in range(1, chosen.rounds + 1):
        name = f"round-{number}"
        if number > 1:
            answer(folder, model, f"answers-{number}", chosen)
            made[f"pairs {number}"] = export(folder, f"answers-{number}", f"pairs-{number}", "pairs")
        settings = "--train_batch_size 32 --micro_train_batch_size 32 --learning_rate 2e-4 --rpo_alpha 1"
        data = "pairs.jsonl" if number == 1 else f"pairs-{number}.jsonl"
        model = trained(folder, name, "dpo", settings, model, data, chosen)
        found[f"dpo round {number}"] = held_out(folder, model, name, chosen)
    return {"rows": made, "held_out": found}


def trained(
    folder: Path, name: str, command: str, settings: str, model: Path, data: str, chosen: argparse.Namespace
) -> Path:
    """Train a stage from `model` on a file of the folder; return the directory of the new model."""
    words = [command, *settings.split(), "--pretrain", str(model), "--prompt_data", str(folder / data)]
    _run(*words, "--seed", str(chosen.seed), "--save_path", str(folder / name))
    return sorted((folder / name / "checkpoints").glob("step_*/model"))[-1]


def answer(folder: Path, model: Path, name: str, chosen: argparse.Namespace) -> None:
    """Sample answers to training prompts."""
    words = f"--eval_data {folder}/prompts.jsonl --max_eval_samples 0 --seed {chosen.seed}"
    _evaluate(folder, model, name, f"{words} --output {folder}/{name}.jsonl")


def held_out(folder: Path, model: Path, name: str, chosen: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Return metrics and intervals of sampled answers to all held-out prompts."""
    words = f"--eval_data {folder}/data/heldout.jsonl --max_eval_samples 0 --seed {chosen.seed}"
    _evaluate(folder, model, name, f"{words} --output {folder}/held-out-{name}.json", *more)
    record = json.loads((folder / f"held-out-{name}.json").read_text())
    return {key: record[key] for key in ("metrics", "intervals")}


def export(folder: Path, answers: str, name: str, what: str) -> int:
    """Make a data set of answers; return the number of its rows."""
    _run("rollouts", str(folder / f"{answers}.jsonl"), "--export", *what.split(), "--output", f"{folder}/{name}.jsonl")
    return len((folder / f"{name}.jsonl").read_text().splitlines())


def _evaluate(folder: Path, model: Path, name: str, words: str, *more: str) -> None:
    sampled = f"--reward exact --eval_n {SAMPLES} --temperature 1 {LENGTH}"
    _run("eval", "--pretrain", str(model), *words.split(), *sampled.split(), *more)


def _run(*words: str) -> None:
    ended = subprocess.run(
        [RFT_TRAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"rft-train {' '.join(words)} ended with {ended.returncode}:\n{ended.stdout[-3000:]}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="")
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rm_epochs", type=int, default=4)
    parser.add_argument("--rm_learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
