"""Make the rows of two small tasks: reverse a word of four letters, sort three digits.

    python make_data.py reverse DIRECTORY
    python make_data.py sort DIRECTORY

writes demos.jsonl (to learn the form of an answer from), train.jsonl (prompts to train on with a reward) and test.jsonl
(held out). No prompt is in two of them. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

LETTERS, DIGITS = "abcdefghij", "0123456789"
NUM_ROWS = {
    "reverse": {"test": 200, "demos": 600, "train": 3000},
    "sort": {"test": 200, "demos": 500, "train": 300},  # all thousand prompts that there are
}
"""Demonstrations are enough for some answers to be right: where none ever is, a reward of 0 or 1 teaches nothing."""


def reverse_row(rng: random.Random) -> dict[str, str]:
    """Return a row such as {"prompt": "reverse: abcd", "answer": "dcba"}."""
    word = "".join(rng.choices(LETTERS, k=4))
    return {"prompt": f"reverse: {word}", "answer": word[::-1]}


def sort_row(rng: random.Random) -> dict[str, str]:
    """Return a row such as {"prompt": "sort: 4 1 3", "answer": "1 3 4"}."""
    digits = rng.choices(DIGITS, k=3)
    return {"prompt": f"sort: {' '.join(digits)}", "answer": " ".join(sorted(digits))}


def rows(task: str, seed: int, count: int) -> list[dict[str, str]]:
    """Return `count` rows of which no two have the same prompt."""
    most = {"reverse": len(LETTERS) ** 4, "sort": len(DIGITS) ** 3}[task]
    if count > most:
        raise ValueError(f"count = {count}: there are {most} different prompts of {task}")
    rng, make = random.Random(seed), {"reverse": reverse_row, "sort": sort_row}[task]
    found: dict[str, dict[str, str]] = {}
    while len(found) < count:
        row = make(rng)
        found[row["prompt"]] = row
    return list(found.values())


def write(task: str, directory: Path, seed: int = 0) -> None:
    """Write the three files of a task."""
    sizes = NUM_ROWS[task]
    remaining = rows(task, seed, sum(sizes.values()))
    directory.mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        taken, remaining = remaining[:size], remaining[size:]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taken), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(NUM_ROWS))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.task, given.directory, given.seed)
