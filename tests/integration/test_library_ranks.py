"""A script of the Python front door on two ranks: it trains, evaluates and resumes, and does what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.compare import read_rows, tensors

from rft_models.tiny_models.text import build_character_model

SCRIPT = """
import json, os, sys
import rft

rows = [{"input": f"{a}+{b}=", "label": f"{a + b:02d}"} for a in range(4) for b in range(4)]
small = {"device": "cpu", "generate_max_len": 4, "prompt_max_len": 8}


def digits(responses):
    return [sum(letter.isdigit() for letter in response) / (1 + len(response)) for response in responses]


class Stop(rft.Callback):
    def on_step(self, run, step, metrics):
        return rft.STOP if step == 2 else None


run = rft.grpo(
    "model", rows, digits, eval_data=rows[:3], callbacks=[Stop()], save_path=sys.argv[1], max_steps=3,
    rollout_batch_size=4, n_samples_per_prompt=4, train_batch_size=16, actor_learning_rate=0.01, **small,
)
stopped = run.step
run = run.resume(reward=digits)
scores = rft.evaluate(run, rows[:5], digits, **small)
told = {"outcome": run.outcome, "steps": [stopped, run.step], "reward": scores.reward, "rows": len(scores.rows)}
open(f"{sys.argv[1]}/told_{os.environ.get('RANK', '0')}.json", "w").write(json.dumps(told))
"""


def told(run: Path) -> list[dict[str, Any]]:
    """What each rank wrote at its end."""
    return [json.loads(file.read_text()) for file in sorted(run.glob("told_*.json"))]


@pytest.mark.full
@pytest.mark.xdist_group("launch")
def test_two_ranks_do_what_one_process_does(tmp_path: Path) -> None:
    build_character_model(tmp_path / "model", hidden=16, layers=1, heads=2, ffn=16, max_positions=32, init_std=0.4)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RFT_CACHE": str(tmp_path / "cache")}
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for name, words in (("one", []), ("two", ranks)):
        command = [sys.executable, *words, "script.py", name]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout == "", "the library prints nothing"
    (one,), two = told(tmp_path / "one"), told(tmp_path / "two")
    assert (one["outcome"], one["steps"], one["rows"]) == ("finished", [2, 3], 5)
    assert two == [pytest.approx(one), pytest.approx(one)], "every rank has the result"
    rewards = [[row["reward/mean"] for row in read_rows(tmp_path / name / "metrics.jsonl")] for name in ("one", "two")]
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-12)
    left, right = (tensors(tmp_path / name, "model/model.safetensors") for name in ("one", "two"))
    for name, tensor in left.items():
        assert (tensor - right[name]).norm() <= 1e-3 * tensor.norm(), name
