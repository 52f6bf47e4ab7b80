"""A run with a teacher that was killed and resumed is the run that was not, with LoRA and with rollouts ahead too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.compare import differences
from support.references import KILLED, References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("invariants")
SHORT = ("--max_steps", "4", "--save_steps", "2", "--generate_max_len", "6")

AHEAD = ("--engine_replicas", "2", "--max_staleness", "1", "--async_deterministic")


@pytest.mark.parametrize("more", [(), ("--lora_rank", "2"), AHEAD], ids=["whole", "lora", "ahead"])
def test_a_run_with_a_teacher_that_is_killed_and_resumed_is_the_run_that_was_not(
    server: ForkServer, task: TinyTask, references: References, runs: Path, more: tuple[str, ...]
) -> None:
    words = (*SHORT, "--reward", "exact", "--teacher_pretrain", str(task.folder / "untrained"), *more)
    expected = references.run("rl", *words)
    rows = [json.loads(line) for line in (expected / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["kl/teacher"] < 100 for row in rows)
    restarts = Restarts(server, task.words("rl", runs / "run", *words), runs / "run")
    assert restarts.start([("signal_at", ["rl.updated", 3, "SIGKILL"])]).wait().code == KILLED
    restarts.finish()
    assert restarts.resumes == 1
    assert differences(expected, runs / "run") == []
