"""R9: a run that one to four ranks began goes on with one to four ranks, and its next step is that of the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.compare import final_checkpoint, read_rows, relative_distance, tensors
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("invariants")

FLAGS = ("--save_steps", "1", "--eval_steps", "0", "--eval_data", "", "--rollout_log_interval", "1")
SUMS = 1e-6
"""Relative distance of sums in another order."""


@pytest.mark.night
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_r9_the_next_step_is_the_same_on_any_number_of_ranks(
    server: ForkServer, task: TinyTask, runs: Path, before: int, after: int
) -> None:
    same, other = runs / "same", runs / "other"
    server.must_finish(*task.words("rl", same, *FLAGS, "--max_steps", "2"), num_ranks=before)
    shutil.copytree(same, other)
    for run, ranks in ((same, before), (other, after)):
        server.must_finish("resume", str(run), "--max_steps", "3", num_ranks=ranks)
    for file in ("model/model.safetensors", "state/optimizer.safetensors"):
        ours, theirs = tensors(other, file), tensors(same, file)
        assert ours.keys() == theirs.keys()
        assert relative_distance(ours.values(), [theirs[name] for name in ours]) < SUMS, file
    ledgers = [json.loads((final_checkpoint(run) / "state" / "ledger.json").read_text()) for run in (same, other)]
    assert ledgers[0] == ledgers[1]
    assert (ledgers[1]["trained"], ledgers[1]["in_flight"]) == (24, []), "eight prompts a step, each once"
    kept = [read_rows(run / "rollouts" / "step_000003.jsonl") for run in (same, other)]
    responses = [[row["response"] for row in rows] for rows in kept]
    assert responses[0] == responses[1]
