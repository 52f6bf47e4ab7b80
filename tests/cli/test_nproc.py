"""`--nproc 2` from the command line: two ranks train one run, a resume starts two again, a failure is shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.setup import TinyTask

from rft_core.errors import ExitCode


def rft_train(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "rft_cli.main", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture
def words(task: TinyTask, runs: Path) -> list[str]:
    """The words of a short run of two ranks."""
    return task.words("rl", runs / "run", "--nproc", "2", "--max_steps", "3", "--eval_steps", "0")


def test_two_ranks_train_one_run_and_a_resume_starts_two_again(words: list[str], runs: Path) -> None:
    first = rft_train(*words, folder=runs)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    assert "1 node x 2 = 2 ranks" in first.stdout
    assert "2 ranks on 1 node agree in" in first.stdout
    assert (runs / "run" / "logs" / "output_rank_1.log").is_file()
    again = rft_train("resume", str(runs / "run"), "--max_steps", "5", folder=runs)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert "starting 2 ranks" in again.stdout
    rows = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert json.loads((runs / "run" / "env.json").read_text())["world_size"] == 2


def test_a_rank_that_is_slow_in_every_step_is_named(words: list[str], runs: Path) -> None:
    (runs / "slow.py").write_text(
        "import os, time\n\ndef reward(responses, labels):\n    time.sleep(0.4 * int(os.environ['RANK']))\n"
        "    return [float(len(response) % 2) for response in responses]\n"
    )
    ended = rft_train(*words, "--max_steps", "12", "--reward", f"{runs / 'slow.py'}:reward", folder=runs)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    rows = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    # the first steps have the trial of the reward and the first calls of everything
    assert {row["time/slowest_rank"] for row in rows[2:]} == {1}
    health = json.loads((runs / "run" / "summary.json").read_text())["health"]
    assert "rank 1 worked" in json.dumps(health)
    assert "straggler" in json.dumps(health)


def test_the_exit_code_is_that_of_the_ranks_and_the_cause_is_shown(words: list[str], runs: Path) -> None:
    ended = rft_train(*words, "--prompt_data", str(runs / "none.jsonl"), folder=runs)
    assert ended.returncode == 4
    assert "none.jsonl" in ended.stderr
    # a rank that hears of the other's failure before it looks for the file itself ends as one that misses a peer
    told = re.search(r"rank \d ended with exit code 4; exit codes of all ranks: \((\d+), (\d+)\)", ended.stderr)
    assert told is not None, ended.stderr
    assert set(map(int, told.groups())) <= {4, int(ExitCode.PEER)}
