"""`--restarts`: a run that is killed goes on by itself, and ends as one that nobody killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.runs import ForkServer
from support.setup import TinyTask

FLAGS = ("--max_steps", "4", "--eval_steps", "0", "--save_steps", "1", "--no-async_save", "--max_ckpt_num", "9")


def killed_once(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, which is killed at the third step that it records."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "RFT_FAULT": "rl.logged:3:kill"}
    command = [sys.executable, "-m", "rft_cli.main", *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300)


def rows(run: Path) -> list[dict[str, float]]:
    """The metrics of the steps without what a clock gives."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    timed = ("time/", "perf/", "memory/", "throughput/")
    return [{name: value for name, value in json.loads(line).items() if not name.startswith(timed)} for line in lines]


def test_a_killed_run_goes_on_by_itself_and_ends_as_one_that_was_not(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    # the process that goes on from step 2 records two steps, and is not killed
    killed = killed_once(task.words("rl", runs / "killed", *FLAGS, "--restarts", "1"), runs)
    assert killed.returncode == 0, killed.stdout[-3000:] + killed.stderr[-3000:]
    server.must_finish(*task.words("rl", runs / "whole", *FLAGS))
    assert "restart 1 of 1 from step 2: it was killed by SIGKILL after step 3" in killed.stderr
    assert "restart 1 of 1 from step 2" in (runs / "killed" / "logs" / "rank_0.log").read_text()
    assert [row["step"] for row in rows(runs / "killed")] == [1, 2, 3, 4]
    for file in ("model/model.safetensors", "state/optimizer.safetensors"):
        one, other = (runs / name / "checkpoints" / "step_000004" / file for name in ("killed", "whole"))
        assert one.read_bytes() == other.read_bytes(), file
    assert rows(runs / "killed") == rows(runs / "whole")
