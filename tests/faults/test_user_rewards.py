"""A reward function with bugs: a run counts them, shows the first of each kind, and logs what the function prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

SOURCE = """
def score(response, label):
    print("a word of the reward")
    kind = len(response) % 3
    if kind == 0:
        raise ValueError("my bug")
    return None if kind == 1 else 1.0
"""


def test_bugs_are_shown_once_and_counted_and_output_is_in_the_log(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    file, path = runs / "rewards.py", runs / "run"
    file.write_text(SOURCE)
    options = ["--max_steps", "3", "--reward", f"{file}:score"]
    options += ["--max_unscored_share", "1", "--rollout_log_interval", "1"]
    ended = server.run(*task.words("rl", path, *options))
    assert ended.code == 0, ended.output[-3000:]
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    counts = {kind: sum(row.get(f"reward/unscored_{kind}", 0) for row in metrics) for kind in ("exception", "none")}
    assert sum(counts.values()) > 0
    for kind, count in counts.items():
        assert ended.output.count(f"gave no score ({kind})") == bool(count)
        assert count == 0 or f"{kind} {count}" in ended.output.partition("without a reward: ")[2]
    assert "unscored=" in ended.output
    assert "a word of the reward" not in ended.output
    log = (path / "logs" / "reward-0.log").read_text()
    assert "a word of the reward" in log
    assert ('raise ValueError("my bug")' in log) == bool(counts["exception"])
    rows = [json.loads(line) for file in (path / "rollouts").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert all(row["detail"] and row["failure"] for row in rows if row["reward"] is None)
