"""Two machines with a cable between them: GRPO learns; a cut cable is named, and the run goes on after it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.setup import TinyTask

from rft_core.errors import ExitCode

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
STEPS = 24


def test_grpo_learns_on_two_nodes(two_nodes: Any, grpo: Callable, metrics: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = two_nodes.launch(grpo(run, STEPS))
    codes = job.wait(240)
    assert codes == [0, 0], job.output(0)[-3000:] + job.output(1)[-3000:]
    rewards = [row["reward/mean"] for row in metrics(run)]
    assert len(rewards) == STEPS
    assert sum(rewards[:3]) / 3 < 0.65
    assert sum(rewards[-3:]) / 3 > 0.85
    printed = job.output(0)
    assert "2 nodes x 1 = 2 ranks" in printed
    assert "2 ranks on 2 nodes agree in" in printed


def test_a_node_that_is_cut_off_is_named_and_the_run_goes_on_when_it_returns(
    two_nodes: Any, grpo: Callable, metrics: Callable, until: Callable, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = grpo(run, STEPS)
    job = two_nodes.launch(words)
    try:
        until(lambda: len(metrics(run)) >= 5, 180)
        two_nodes.cut()
        codes = job.wait(90)
    finally:
        job.stop()
    assert 0 not in codes, codes
    for node, other in ((0, 1), (1, 0)):
        printed = job.output(node)
        silence = rf"rank {other} \([^)]*pid \d+\)[^\n]* has (sent no heartbeat|not answered) for"
        assert re.search(silence, printed), printed[-4000:]
        assert f"exitcode  : {int(ExitCode.PEER)}" in printed
    assert f"rft-train resume {run}" in job.output(1)
    lost = len(metrics(run))
    assert 5 <= lost < STEPS
    two_nodes.mend()
    again = two_nodes.launch([*words, "--load_checkpoint"])
    assert again.wait(240) == [0, 0], again.output(0)[-3000:]
    assert "continuing" in again.output(0)
    steps = [row["step"] for row in metrics(run)]
    assert steps == list(range(1, STEPS + 1))
    assert sum(row["reward/mean"] for row in metrics(run)[-3:]) / 3 > 0.85


def test_what_differs_on_the_second_node_is_named_on_both_before_a_model_loads(
    two_nodes: Any, grpo: Callable, task: TinyTask, tmp_path: Path
) -> None:
    run = tmp_path / "shared" / "run"
    run.parent.mkdir()
    other = tmp_path / "other"
    shutil.copytree(task.model, other / "model")
    shutil.copytree(ROOT / "packages/rft-algos/src/rft_algos", other / "rft_algos")
    (other / "rft_algos" / "one_more.py").write_text("")
    config = json.loads((other / "model" / "config.json").read_text())
    (other / "model" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    rows = (task.folder / "train.jsonl").read_text()
    (other / "train.jsonl").write_text(rows.replace("0", "1", 1))
    (other / "zeros.py").write_text((tmp_path / "zeros.py").read_text() + "\n")
    (other / "empty").mkdir()
    mounts = [
        (other / "model", task.model),
        (other / "train.jsonl", task.folder / "train.jsonl"),
        (other / "zeros.py", tmp_path / "zeros.py"),
        (other / "rft_algos", ROOT / "packages/rft-algos/src/rft_algos"),
        (other / "empty", run.parent),
    ]
    job = two_nodes.launch(grpo(run, 2), mounts=mounts)
    codes = job.wait(120)
    assert 0 not in codes
    planted = (
        "pretrain: model config.json",
        "file prompt_data 1",
        "file reward",
        "code rft_algos",
        f"folder {run.parent}",
    )
    for node in (0, 1):
        printed = job.output(node)
        assert "node 1 (" in printed
        assert "differs from node 0 (rank 0) in 5 things" in printed, printed[-4000:]
        assert all(f"node 1: {name} |" in printed for name in planted)
        assert f"exitcode  : {int(ExitCode.PREFLIGHT)}" in printed
    assert not (run / "config.yaml").exists()
    assert "step  1" not in job.output(0)
