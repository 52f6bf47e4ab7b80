"""The example of a judge: its rows are sound, and its commands, as the page shows them, teach it from nothing."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rft_cli.main import main
from rft_trainer.runs.reader import read_run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "judge"
BLOCKS = re.findall(r"^```sh\n(.*?)^```", (FOLDER / "README.md").read_text(), flags=re.M | re.S)
COMMANDS, OF_THE_POLICY = (
    [shlex.split(line)[1:] for line in block.replace("\\\n", " ").splitlines()] for block in BLOCKS
)


def make_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", COMMANDS[0])
    runpy.run_path(COMMANDS[0][0], run_name="__main__")


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("data/judge", f"{name}.jsonl").read_text().splitlines()]


def read_question(row: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    """The three digits and the answer of a row."""
    asked, _, answer = row["prompt"].partition(": ")
    return tuple(map(int, asked.removeprefix("largest of ").split())), answer.removesuffix(" right?")


def test_a_verdict_says_whether_the_answer_is_right_and_half_of_those_about_digits_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rows(tmp_path, monkeypatch)
    parts = {name: rows(name) for name in ("demos", "train", "test")}
    sizes = {"demos": 320, "train": 200, "test": 200}
    asked = [read_question(row)[0] for name, part in parts.items() for row in part[: sizes[name]]]
    assert len(set(asked)) == len(asked) == 720
    for name, part in parts.items():
        for row in part:
            digits, answer = read_question(row)
            assert row["label"] == str(int(answer == str(max(digits))))
            assert row["answer"] == f"<think>{max(digits)}</think><answer>{row['label']}</answer>"
        about_digits = part[: sizes[name]]
        assert all(read_question(row)[1] in {str(digit) for digit in read_question(row)[0]} for row in about_digits)
        assert 0.4 < sum(row["label"] == "1" for row in about_digits) / len(about_digits) < 0.6


def test_the_judge_reads_answers_of_any_characters_about_questions_of_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rows(tmp_path, monkeypatch)
    parts = {"demos": rows("demos")[320:], "train": rows("train")[200:]}
    for name, part in parts.items():
        assert {read_question(row)[0] for row in part} <= {read_question(row)[0] for row in rows(name)}
        assert {row["label"] for row in part} == {"0"}
    answers = [read_question(row)[1] for part in parts.values() for row in part]
    assert "" in answers
    assert {chr(code) for code in range(32, 127)} <= {letter for answer in answers for letter in answer}


def test_a_policy_is_asked_about_the_same_digits_and_shown_any_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rows(tmp_path, monkeypatch)
    template = Path("data/judge/judge.txt").read_text()
    for name in ("demos", "train", "test"):
        for ours, theirs in zip(rows(f"policy-{name}"), rows(name), strict=False):
            digits, answer = read_question(theirs)
            assert template.replace("{prompt}", ours["prompt"]).replace("{response}", answer) == theirs["prompt"]
            assert ours["answer"] in [str(digit) for digit in digits]
            assert name == "demos" or ours["answer"] == str(max(digits))
    right = [row["answer"] == str(max(map(int, row["prompt"].split()[2:]))) for row in rows("policy-demos")]
    assert 0.2 < sum(right) / len(right) < 0.45


@pytest.mark.night
def test_the_commands_of_the_page_teach_the_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_rows(tmp_path, monkeypatch)
    for words in COMMANDS[1:]:
        assert main(words) == 0
    judge = read_run(tmp_path / "runs" / "judge-rl")
    before, after = judge.accuracy("before"), judge.accuracy("after")
    assert before is not None
    assert after is not None
    assert after >= max(before, 0.85)
    sampled = judge.series("reward/numeric")
    assert fmean(sampled[-5:]) >= fmean(sampled[:5]) + 0.05
    for words in OF_THE_POLICY:
        assert main(words) == 0
    rewarded = read_run(tmp_path / "runs" / "policy-rl")
    assert rewarded.series("reward/unscored")[0] < 0.1, "the judge has a verdict on what a policy writes"
    verdicts = rewarded.series("reward/mean")
    assert fmean(verdicts[-3:]) >= fmean(verdicts[:3]) + 0.2
