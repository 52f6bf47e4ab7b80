"""The example of the reward `code`: its rows have tests that their programs pass, and no other function does."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from rft_trainer.rewards.unit_tests.code_tests import read_tests
from rft_trainer.sandbox.cage_main import encode

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "code_reward"


def make_rows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_data.py", str(directory)])
    runpy.run_path(str(FOLDER / "make_data.py"), run_name="__main__")


def test_the_tests_of_a_row_tell_its_program_from_every_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_rows(tmp_path, monkeypatch)
    rows = [json.loads(line) for name in ("demos", "train", "test") for line in (tmp_path / f"{name}.jsonl").open()]
    assert len({row["prompt"] for row in rows}) == len(rows)
    told: dict[str, set[str]] = {}
    for row in rows:
        space: dict[str, object] = {}
        exec(row["answer"], space)  # of the example's own making
        tests = read_tests(row["tests"])
        given = [each["args"][0] for each in row["tests"]]
        assert [test.failure({"value": encode(space["f"](x))}) for test, x in zip(tests, given, strict=True)] == [
            ""
        ] * 4
        results = json.dumps([each["expected"] for each in row["tests"]])
        told.setdefault(results, set()).add(json.dumps([space["f"](x) for x in range(-20, 20)]))
    assert {len(functions) for functions in told.values()} == {1}
