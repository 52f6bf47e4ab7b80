"""Make the rows of a small judge, which says whether an answer is right.

    python make_data.py DIRECTORY

The question is which of three digits is the largest. demos.jsonl has verdicts with their reasons, to learn the form
from, train.jsonl questions with the right verdict, to train on with rules; test.jsonl is held out. No three digits are
in two files, and half of the questions are about a right answer. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

NUM_ROWS = {"test": 200, "demos": 320, "train": 200}
"""Together they are all choices of three different digits, in every order."""


def question(digits: tuple[int, ...], answer: int) -> dict[str, str]:
    """Return a row such as {"prompt": "largest of 4 9 2: 4 right?", "answer": "<think>9</think>...", "label": "0"}."""
    verdict = str(int(answer == max(digits)))
    asked = f"largest of {' '.join(map(str, digits))}: {answer} right?"
    return {"prompt": asked, "answer": f"<think>{max(digits)}</think><answer>{verdict}</answer>", "label": verdict}


def write(directory: Path, seed: int = 0) -> None:
    """Write the three files."""
    rng = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    every = list(itertools.permutations(range(10), 3))
    rng.shuffle(every)
    remaining = [
        question(digits, max(digits) if number % 2 else rng.choice(sorted(digits)[:2]))
        for number, digits in enumerate(every)
    ]
    for name, size in NUM_ROWS.items():
        taken, remaining = remaining[:size], remaining[size:]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taken), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.directory, given.seed)
