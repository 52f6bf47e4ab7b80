"""Make the rows of a small programming task: a function of one number, told in words.

    python make_data.py DIRECTORY

writes demos.jsonl (programs to learn the form from), train.jsonl (prompts with unit tests, to train on with the reward
`code`) and test.jsonl (held out). No prompt is in two of them. The same seed writes the same bytes. Only a part
of the demonstrations is right; `SHARES` says how many make which mistake.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

NUM_ROWS = {"test": 120, "demos": 300, "train": 156}
"""Together they are all prompts that there are."""
LARGEST = 12
NUM_PROMPTS = 4 * LARGEST**2
"""Of a multiplication before or behind an addition or a subtraction, with two numbers from 1 to `LARGEST`."""
SHARES = {"right": 0.3, "no parentheses": 0.3, "order swapped": 0.4}
WORDS = {"+": "add", "-": "take", "*": "times"}
INPUTS = (0, 1, 7, -12)
"""What the tests call the function with: two different functions of the task differ on one of them."""


def row(rng: random.Random) -> dict[str, Any]:
    """Return a row such as {"prompt": "add 4, times 3", "answer": "def f(x): ...", "tests": [...]}."""
    # of two operations one is a multiplication, so that their order counts
    first, second = rng.sample([rng.choice("+-"), "*"], 2)
    a, b = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
    return {
        "prompt": f"{WORDS[first]} {a}, {WORDS[second]} {b}",
        "answer": f"def f(x):\n    return (x {first} {a}) {second} {b}",
        "tests": [{"call": "f", "args": [x], "expected": _applied(_applied(x, first, a), second, b)} for x in INPUTS],
    }


def demonstrated(found: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a row with a program as the demonstrations have it: right, or with one of the mistakes."""
    head, expression = found["answer"].split("return ")
    first, second = expression.rsplit(" ", 2)[0], expression.split(") ")[1]
    programs = {
        "right": found["answer"],
        "no parentheses": found["answer"].replace("return (", "return ").replace(") ", " "),
        "order swapped": f"{head}return (x {second}) {first[3:-1]}",
    }
    (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
    return found | {"answer": programs[kind]}


def _applied(x: int, operator: str, number: int) -> int:
    return {"+": x + number, "-": x - number, "*": x * number}[operator]


def rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Return `count` rows of which no two have the same prompt.

    Raises:
        ValueError: there are not so many prompts.
    """
    if count > NUM_PROMPTS:
        raise ValueError(f"count = {count}: there are {NUM_PROMPTS} different prompts")
    rng = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        made = row(rng)
        found[made["prompt"]] = made
    return list(found.values())


def write(directory: Path, seed: int = 0) -> None:
    """Write the three files."""
    remaining, rng = rows(seed, sum(NUM_ROWS.values())), random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    for name, size in NUM_ROWS.items():
        taken, remaining = remaining[:size], remaining[size:]
        taken = [demonstrated(each, rng) for each in taken] if name == "demos" else taken
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in taken), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.directory, given.seed)
