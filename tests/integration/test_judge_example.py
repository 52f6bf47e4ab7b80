"""The example of a judge: its rows are sound, and its commands, as the page shows them, teach it from nothing."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from rft_cli.main import main
from rft_trainer.runs.reader import read_run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "judge"
[BLOCK] = re.findall(r"^```sh\n(.*?)^```", (FOLDER / "README.md").read_text(), flags=re.M | re.S)
COMMANDS = [shlex.split(line)[1:] for line in BLOCK.replace("\\\n", " ").splitlines() if line]


def make_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", COMMANDS[0])
    runpy.run_path(COMMANDS[0][0], run_name="__main__")


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("data/judge", f"{name}.jsonl").read_text().splitlines()]


def digits(text: str) -> list[int]:
    return [int(digit) for digit in text[len("largest of ") :].partition(":")[0].split()]


def test_a_verdict_says_whether_the_answer_is_right_and_half_of_them_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rows(tmp_path, monkeypatch)
    parts = [rows(name) for name in ("demos", "train", "test")]
    asked = [tuple(digits(row["prompt"])) for part in parts for row in part]
    assert len(set(asked)) == len(asked) == 720
    for part in parts:
        for row in part:
            largest, answer = max(digits(row["prompt"])), int(row["prompt"].partition(": ")[2][0])
            assert answer in digits(row["prompt"])
            assert row["label"] == str(int(answer == largest))
            assert row["answer"] == f"<think>{largest}</think><answer>{row['label']}</answer>"
        assert 0.4 < sum(row["label"] == "1" for row in part) / len(part) < 0.6


@pytest.mark.night
def test_the_commands_of_the_page_teach_the_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_rows(tmp_path, monkeypatch)
    for words in COMMANDS[1:]:
        assert main(words) == 0
    judge = read_run(tmp_path / "runs" / "judge-rl")
    before, after = judge.accuracy("before"), judge.accuracy("after")
    assert before is not None
    assert after is not None
    assert after >= before + 0.1
