"""Held-out pair accuracy of a small reward model on GSM8K solutions, beside simple baselines, with 95 % intervals.

    RFT_DATA_DIR=... python benchmarks/reward_model_gsm8k.py [--hidden 192 --layers 4 --max_epochs 3]

A pair is a correct and a wrong solution of one question, both written by models (GSM8K's example_model_solutions); the
human solution is left out, since its style would tell. Questions are divided before pairs are made, and a held-out
question gives one pair, so that pairs are independent and Wilson's interval holds. All choices are keyed by the seed.
See README.md. The last line is `worst_ratio=<x> against <baseline> at pair accuracy`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid

import rft
from rft_algos.statistics import wilson_interval
from rft_cli.main import main as rft_train
from rft_core.keyed_random import derive_key, permutation

RESULTS = Path(__file__).resolve().parent / "results" / "reward_model_gsm8k.json"
SOLVERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
HELD_OUT = 300
WORD = re.compile(r"\d+|[a-zA-Z]+|[^\sa-zA-Z\d]")


def main() -> None:
    """Make the pairs, train, and print the table."""
    chosen = _arguments()
    train, held_out = pairs(chosen.seed, chosen.max_pairs)
    names = {
        "longer solution": [_length(row) for row in held_out],
        "shorter solution": [-_length(row) for row in held_out],
        "bag of words, logistic regression": bag_of_words(train, held_out),
    }
    with tempfile.TemporaryDirectory() as folder:
        record = reward_model(Path(folder), train, held_out, chosen)
    table = {name: _share([margin > 0 for margin in margins]) for name, margins in names.items()}
    table["reward model"] = _share([True] * record["num_right"] + [False] * (len(held_out) - record["num_right"]))
    for name, (share, low, high) in table.items():
        print(f"{name:<36} {share:6.1%}  (95 %: {low:.1%} to {high:.1%})")
    best = max((name for name in names), key=lambda name: table[name][0])
    RESULTS.write_text(json.dumps({"arguments": vars(chosen), "table": table, "run": record}, indent=2) + "\n")
    print(f"{len(train)} training pairs, {len(held_out)} held-out pairs; {record['parameters']:,} parameters")
    print(f"worst_ratio={table['reward model'][0] / table[best][0]:.3f} against {best} at pair accuracy")


def pairs(seed: int, most: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(training pairs, held-out pairs): no question is on both sides."""
    path = Path(os.environ["RFT_DATA_DIR"]) / "gsm8k" / "example_model_solutions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    made = [found for row in rows if (found := _pairs_of(row))]
    order = permutation(derive_key(seed, "questions"), len(made)).tolist()
    held_out = [made[index][index % len(made[index])] for index in order[:HELD_OUT]]
    train = [pair for index in order[HELD_OUT:] for pair in made[index]]
    return train[:most] if most else train, held_out


def _pairs_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Every correct with every wrong solution of a question."""
    texts: dict[bool, list[str]] = {True: [], False: []}
    for solver in SOLVERS:
        texts[row[solver]["is_correct"]].append(row[solver]["solution"])
    asked = row["question"] + "\n"
    return [{"input": asked, "chosen": a, "rejected": b} for a, b in product(texts[True], texts[False]) if a != b]


def bag_of_words(train: Sequence[Mapping[str, str]], held_out: Sequence[Mapping[str, str]]) -> list[float]:
    """Margins of a logistic regression on the difference of word counts, with an L2 penalty."""
    counts = Counter(word for row in train for side in ("chosen", "rejected") for word in set(_words(row[side])))
    index = {word: number for number, (word, seen) in enumerate(counts.most_common()) if seen >= 5}

    def features(rows: Sequence[Mapping[str, str]]) -> torch.Tensor:
        matrix = torch.zeros(len(rows), len(index))
        for number, row in enumerate(rows):
            for side, sign in (("chosen", 1.0), ("rejected", -1.0)):
                for word in _words(row[side]):
                    if word in index:
                        matrix[number, index[word]] += sign
        return matrix

    matrix, weights = features(train), torch.zeros(len(index), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = -logsigmoid(matrix @ weights).mean() + 0.01 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return (features(held_out) @ weights.detach()).tolist()


def reward_model(
    folder: Path, train: Sequence[Mapping[str, str]], held_out: Sequence[Mapping[str, str]], chosen: argparse.Namespace
) -> dict[str, Any]:
    """Build a model, train it on demonstrations of the correct solutions where asked, then on the pairs."""
    for name, rows in (("train", train), ("held", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "texts.txt").write_text("\n".join(row["input"] + row["chosen"] for row in train))
    sizes = {"hidden": chosen.hidden, "layers": chosen.layers, "vocab_size": 1024, "max_positions": 2048}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    model = folder / "model"
    assert rft_train(["build", "--texts", str(folder / "texts.txt"), "--save_path", str(model), *words]) == 0
    start: Any = model
    if chosen.sft_steps:
        start = rft.sft(
            str(model),
            str(folder / "train.jsonl"),
            output_key="chosen",
            max_steps=chosen.sft_steps,
            max_epochs=99,
            learning_rate=1e-3,
            save_path=str(folder / "sft"),
        )
    run = rft.reward_model(
        start if chosen.sft_steps else str(model),
        str(folder / "train.jsonl"),
        eval_data=str(folder / "held.jsonl"),
        max_epochs=chosen.max_epochs,
        learning_rate=chosen.learning_rate,
        train_batch_size=16,
        packing_samples=True,
        max_tokens_per_micro_batch=4096,
        seed=chosen.seed,
        save_path=str(folder / "rm"),
    )
    evaluations = [json.loads(line) for line in (folder / "rm" / "evals.jsonl").read_text().splitlines()]
    after = evaluations[-1]
    print(f"run {run}")
    from rft_models.reward_model.loading import load_reward_model

    newest = sorted((folder / "rm" / "checkpoints").glob("step_*/model"))[-1]
    return {
        "num_right": round(after["eval/accuracy"] * after["eval/n"]),
        "parameters": load_reward_model(newest).num_parameters,
        "evaluations": evaluations,
    }


def _words(text: str) -> list[str]:
    return WORD.findall(text)


def _length(row: Mapping[str, str]) -> int:
    return len(row["chosen"]) - len(row["rejected"])


def _share(right: Sequence[bool]) -> tuple[float, float, float]:
    found = wilson_interval(sum(right), len(right))
    return found.estimate, found.low, found.high


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--max_epochs", type=int, default=2)
    parser.add_argument("--max_pairs", type=int, default=0)
    parser.add_argument("--sft_steps", type=int, default=0)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
