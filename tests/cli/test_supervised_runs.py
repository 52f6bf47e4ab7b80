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


def killed_at(fault: str, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, which is killed at a fault point; so are those that it starts."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "RFT_FAULT": f"{fault}:kill"}
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
    killed = killed_at("rl.logged:3", task.words("rl", runs / "killed", *FLAGS, "--restarts", "1"), runs)
    assert killed.returncode == 0, killed.stdout[-3000:] + killed.stderr[-3000:]
    server.must_finish(*task.words("rl", runs / "whole", *FLAGS))
    assert "restart 1 of 1 from step 2: it was killed by SIGKILL after step 3" in killed.stderr
    assert "restart 1 of 1 from step 2" in (runs / "killed" / "logs" / "rank_0.log").read_text()
    assert [row["step"] for row in rows(runs / "killed")] == [1, 2, 3, 4]
    for file in ("model/model.safetensors", "state/optimizer.safetensors"):
        one, other = (runs / name / "checkpoints" / "step_000004" / file for name in ("killed", "whole"))
        assert one.read_bytes() == other.read_bytes(), file
    assert rows(runs / "killed") == rows(runs / "whole")


def test_an_evaluation_that_is_killed_again_and_again_goes_on_from_its_rows(task: TinyTask, runs: Path) -> None:
    data = runs / "rows.jsonl"
    data.write_text("".join(json.dumps({"input": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(5)))
    # 256 responses to a prompt: the rows of each are kept on their own
    words = ["eval", "--pretrain", str(task.model), "--eval_data", str(data), "--reward", "exact", "--temperature", "1"]
    words += ["--eval_n", "256", "--generate_max_len", "2", "--prompt_max_len", "8"]
    whole = killed_at("run.append:99", [*words, "--output", "whole.jsonl"], runs)
    assert whole.returncode == 0, whole.stderr[-3000:]
    # a start keeps one or two prompts before it is killed: more restarts than one, and each of them with newer rows
    killed = killed_at("run.append:3", [*words, "--output", "killed.jsonl", "--restarts", "1"], runs)
    assert killed.returncode == 0, killed.stdout[-3000:] + killed.stderr[-3000:]
    assert killed.stderr.count("restart 1 of 1 from its beginning: it was killed by SIGKILL") == 2
    assert (runs / "killed.jsonl").read_bytes() == (runs / "whole.jsonl").read_bytes()
    assert not (runs / "killed.jsonl.partial").exists()
