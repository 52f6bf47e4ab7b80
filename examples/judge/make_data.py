"""Make the rows of a small judge, which says whether an answer is right, and of a policy that it rewards.

    python make_data.py DIRECTORY

The question is which of three digits is the largest. demos.jsonl has verdicts with their reasons, to learn the form
from, train.jsonl questions with the right verdict, to train on with rules; test.jsonl is held out. No three digits are
in two files, and half of the questions are about a right answer. Behind these, demos.jsonl and train.jsonl have
questions about answers of any characters, which are wrong: a policy writes such answers, and a judge that has seen
digits alone gives no verdict about them. policy-demos.jsonl, policy-train.jsonl and policy-test.jsonl hold the same
digits for a policy: demonstrations that name any of the three, and questions with the right answer. judge.txt is what
the judge is asked about a policy's answer. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path

NUM_ROWS = {"test": 200, "demos": 320, "train": 200}
"""Together they are all choices of three different digits, in every order."""
NUM_STRANGE = {"test": 0, "demos": 240, "train": 50}
"""Rows about answers of any characters."""
TEMPLATE = "{prompt}: {response} right?"
CHARACTERS = [chr(code) for code in range(32, 127)]


def question(digits: tuple[int, ...], answer: str) -> dict[str, str]:
    """Return a row such as {"prompt": "largest of 4 9 2: 4 right?", "answer": "<think>9</think>...", "label": "0"}."""
    verdict = str(int(answer == str(max(digits))))
    asked = TEMPLATE.format(prompt=f"largest of {' '.join(map(str, digits))}", response=answer)
    return {"prompt": asked, "answer": f"<think>{max(digits)}</think><answer>{verdict}</answer>", "label": verdict}


def strange_answer(largest: int, rng: random.Random) -> str:
    """Return an answer of up to four characters; a third of them hold the right digit and something else."""
    text = "".join(rng.choices(CHARACTERS, k=rng.randrange(5)))
    if rng.random() < 1 / 3:
        place = rng.randrange(len(text) + 1)
        text = f"{text[:place]}{largest}{text[place:]}"
    return text if text != str(largest) else text * 2


def write(directory: Path, seed: int = 0) -> None:
    """Write the files."""
    rng = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    remaining = list(itertools.permutations(range(10), 3))
    rng.shuffle(remaining)
    for name, size in NUM_ROWS.items():
        taken, remaining = remaining[:size], remaining[size:]
        asked = [max(one) if number % 2 else rng.choice(sorted(one)[:2]) for number, one in enumerate(taken)]
        strange = rng.choices(taken, k=NUM_STRANGE[name])
        rows = [question(one, str(answer)) for one, answer in zip(taken, asked, strict=True)]
        _write(directory / f"{name}.jsonl", [*rows, *(question(one, strange_answer(max(one), rng)) for one in strange)])
        policy = ({"prompt": f"largest of {' '.join(map(str, one))}", "answer": str(max(one))} for one in taken)
        if name == "demos":
            policy = ({"prompt": row["prompt"], "answer": row["prompt"][-1 - 2 * rng.randrange(3)]} for row in policy)
        _write(directory / f"policy-{name}.jsonl", policy)
    (directory / "judge.txt").write_text(TEMPLATE, encoding="utf-8")


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.directory, given.seed)
