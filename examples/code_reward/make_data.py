"""Make the rows of a small programming task: a function of one number, told in words.

    python make_data.py DIRECTORY

writes demos.jsonl (programs to learn the form from), train.jsonl (prompts with unit tests, to train on with the reward
`code`) and test.jsonl (held out). No prompt is in two of them. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

NUM_ROWS = {"test": 150, "demos": 279, "train": 300}
WORDS = {"+": "add", "-": "take", "*": "times"}
INPUTS = (0, 1, 7, -12)
"""What the tests call the function with: two different functions of the task differ on one of them."""


def row(rng: random.Random) -> dict[str, Any]:
    """Return a row such as {"prompt": "add 4, times 3", "answer": "def f(x): ...", "tests": [...]}."""
    (first, a), (second, b) = ((rng.choice("+-*"), rng.randint(1, 9)) for _ in range(2))
    program = f"def f(x):\n    return (x {first} {a}) {second} {b}"
    return {
        "prompt": f"{WORDS[first]} {a}, {WORDS[second]} {b}",
        "answer": program,
        "tests": [{"call": "f", "args": [x], "expected": _applied(_applied(x, first, a), second, b)} for x in INPUTS],
    }


def _applied(x: int, operator: str, number: int) -> int:
    return {"+": x + number, "-": x - number, "*": x * number}[operator]


def rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Return `count` rows of which no two have the same prompt."""
    rng = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        made = row(rng)
        found[made["prompt"]] = made
    return list(found.values())


def write(directory: Path, seed: int = 0) -> None:
    """Write the three files."""
    remaining = rows(seed, sum(NUM_ROWS.values()))
    directory.mkdir(parents=True, exist_ok=True)
    for name, size in NUM_ROWS.items():
        taken, remaining = remaining[:size], remaining[size:]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in taken), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.directory, given.seed)
