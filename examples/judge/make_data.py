"""Make the rows of a small judge, which says whether an answer is right, and of a policy that its verdicts train.

    python make_data.py DIRECTORY

The policy says which of three digits is the largest. judge_demos.jsonl has verdicts with their reasons, to learn the
form from, judge_train.jsonl questions with the right verdict, to train on with rules; judge_test.jsonl is held out.
question.txt makes such a question of a prompt and a response. demos.jsonl, train.jsonl and test.jsonl are those of the
policy: its demonstrations name any of the three digits. No three digits are in two files of the judge, nor of the
policy, and half of the questions are about a right answer. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

NUM_QUESTIONS = {"test": 200, "demos": 320, "train": 200}
"""Together they are all choices of three different digits, in every order."""
NUM_PROMPTS = {"test": 200, "demos": 120, "train": 400}
TEMPLATE = "{prompt}{response} right?"


def question(digits: tuple[int, ...], answer: int) -> dict[str, str]:
    """Return a row such as {"prompt": "largest of 4 9 2: 4 right?", "answer": "<think>9</think>...", "label": "0"}."""
    verdict = str(int(answer == max(digits)))
    asked = TEMPLATE.format(prompt=prompt(digits), response=answer)
    return {"prompt": asked, "answer": f"<think>{max(digits)}</think><answer>{verdict}</answer>", "label": verdict}


def prompt(digits: tuple[int, ...]) -> str:
    """Return what the policy is asked, such as "largest of 4 9 2: "."""
    return f"largest of {' '.join(map(str, digits))}: "


def write(directory: Path, seed: int = 0) -> None:
    """Write the files of judge and policy."""
    rng = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "question.txt").write_text(TEMPLATE, encoding="utf-8")
    every = list(itertools.permutations(range(10), 3))
    rng.shuffle(every)
    judged = [
        question(digits, max(digits) if number % 2 else rng.choice(sorted(digits)[:2]))
        for number, digits in enumerate(every)
    ]
    rng.shuffle(every)
    asked = [{"prompt": prompt(digits), "answer": str(max(digits))} for digits in every]
    for prefix, remaining, sizes in (("judge_", judged, NUM_QUESTIONS), ("", asked, NUM_PROMPTS)):
        for name, size in sizes.items():
            taken, remaining = remaining[:size], remaining[size:]
            if prefix + name == "demos":  # the form alone: one of the digits, whichever
                taken = [row | {"answer": rng.choice(row["prompt"][11:16].split())} for row in taken]
            text = "".join(json.dumps(row) + "\n" for row in taken)
            (directory / f"{prefix}{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.directory, given.seed)
