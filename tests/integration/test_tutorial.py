"""The tutorial, run as it stands: every command of its page, with the lines that the page quotes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rft_trainer.runs.reader import read_run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"(?:^<!-- file: (\S+) -->\n)?^```(sh|python|text)\n(.*?)^```", re.M | re.S)
LIMIT_S = 1500


@dataclass
class Step:
    """Commands of one block, with the files that are saved before and the lines that are quoted behind."""

    commands: str
    files: dict[str, str] = field(default_factory=dict)
    quoted: list[str] = field(default_factory=list)


def steps(page: str) -> list[Step]:
    """The page as a person follows it, without its part on the installation."""
    found: list[Step] = []
    files: dict[str, str] = {}
    for name, language, text in BLOCK.findall(page):
        if language == "sh":
            found.append(Step(text, files))
            files = {}
        elif language == "python":
            files[name] = text
        else:
            found[-1].quoted += [line for line in text.splitlines() if line.strip() not in ("", "...")]
    return found[1:]


def pattern(line: str) -> str:
    """A line as it is compared: numbers, times and the width of columns differ from machine to machine."""
    numbers = re.sub(r"[-+]?\d[\d,.]*(e-?\d+)?", "N", line)
    return " ".join(re.sub(r"(N h )?(N min )?N s\b", "TIME", numbers).split())


def test_a_page_is_taken_apart_as_a_person_reads_it() -> None:
    page = "```sh\npip\n```\n<!-- file: a.py -->\n```python\nx\n```\n```sh\nls\n```\n```text\none 12\n...\n```\n"
    assert steps(page) == [Step("ls\n", {"a.py": "x\n"}, ["one 12"])]
    assert pattern("step 25/60  reward=0.18") == pattern("step 7/60 reward=0.5")
    assert pattern("finished, 60 steps, 38 s, more") == pattern("finished, 60 steps, 2 min 05 s, more")
    assert pattern("reward") != pattern("loss")


def test_every_file_of_the_tutorial_has_a_name_and_every_quotation_a_command() -> None:
    found = steps(PAGE.read_text())
    assert len(found) >= 8
    assert {name for step in found for name in step.files} == {"my_reward.py"}
    assert "python3 -m pip install uv" not in "".join(step.commands for step in found)
    assert sum(bool(step.quoted) for step in found) >= 6


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_every_command_of_the_tutorial_does_what_the_page_says(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    missing: dict[str, list[str]] = {}
    for step in steps(PAGE.read_text()):
        for name, text in step.files.items():
            (tmp_path / name).write_text(text)
        done = subprocess.run(
            ["bash", "-c", step.commands],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        print(f"$ {step.commands}{done.stdout}")
        assert done.returncode == 0, f"{step.commands}\n{done.stdout[-3000:]}"
        printed = {pattern(line) for line in done.stdout.splitlines()}
        missing[step.commands] = [line for line in step.quoted if not any(pattern(line) in other for other in printed)]
    assert not any(missing.values()), missing
    first, digits = (read_run(tmp_path / "runs" / name) for name in ("first", "digits"))
    for run in (first, digits):
        before, after = run.accuracy("before"), run.accuracy("after")
        assert before is not None
        assert after is not None
        assert after >= before + 0.05
    assert (digits.step, digits.summary["outcome"]) == (120, "finished")
