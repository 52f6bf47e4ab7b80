"""The example of the reward `code`: its rows have tests that their programs pass, and no other function does."""

from __future__ import annotations

import json
import random
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rft_trainer.rewards.unit_tests.code_tests import read_tests
from rft_trainer.sandbox.cage_main import encode

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "code_reward"


def make_rows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_data.py", str(directory)])
    runpy.run_path(str(FOLDER / "make_data.py"), run_name="__main__")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(row: dict[str, Any], inputs: Iterable[int]) -> list[int]:
    """What the program of a row returns."""
    space: dict[str, Any] = {}
    exec(row["answer"], space)  # of the example's own making
    return [space["f"](x) for x in inputs]


def test_the_tests_of_a_row_tell_its_program_from_every_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_rows(tmp_path, monkeypatch)
    demos, train, test = (read_rows(tmp_path / f"{name}.jsonl") for name in ("demos", "train", "test"))
    rows = [*train, *test]
    assert len({row["prompt"] for row in [*demos, *rows]}) == len(demos) + len(rows)
    told: dict[str, set[str]] = {}
    for row in rows:
        given = [each["args"][0] for each in row["tests"]]
        replies = [{"value": encode(value)} for value in results(row, given)]
        tests = read_tests(row["tests"])
        assert [test.failure(reply) for test, reply in zip(tests, replies, strict=True)] == [""] * 4
        expected = json.dumps([each["expected"] for each in row["tests"]])
        told.setdefault(expected, set()).add(json.dumps(results(row, range(-20, 20))))
    assert {len(functions) for functions in told.values()} == {1}


def test_most_demonstrations_are_valid_programs_with_one_of_two_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rows(tmp_path, monkeypatch)
    demos = read_rows(tmp_path / "demos.jsonl")
    right = [
        results(row, [each["args"][0] for each in row["tests"]]) == [each["expected"] for each in row["tests"]]
        for row in demos
    ]
    # 30 % are written right, and of the 30 % without parentheses those whose multiplication comes first
    assert 0.35 < sum(right) / len(demos) < 0.55
    for first, second in ("+*", "*+", "-*", "*-"):
        row = {"prompt": "", "answer": f"def f(x):\n    return (x {first} 3) {second} 7", "tests": []}
        made = runpy.run_path(str(FOLDER / "make_data.py"))["demonstrated"]
        programs = {made(row, random.Random(seed))["answer"].split("return ")[1] for seed in range(40)}
        assert programs == {
            f"(x {first} 3) {second} 7",
            f"x {first} 3 {second} 7",
            f"(x {second} 7) {first} 3",
        }


def test_more_prompts_than_there_are_are_refused() -> None:
    example = runpy.run_path(str(FOLDER / "make_data.py"))
    assert sum(example["NUM_ROWS"].values()) == example["NUM_PROMPTS"] == 576
    with pytest.raises(ValueError, match="count = 577: there are 576 different prompts"):
        example["rows"](0, 577)
