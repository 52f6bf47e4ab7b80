"""E5: engines that always die end the run with the cause; its checkpoint stays, and a resume goes on from it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.compare import checkpoints, differences
from support.references import References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = [pytest.mark.xdist_group("faults"), pytest.mark.night]

SERVICE = 8
SECONDS_TO_END = 30.0
WORDS = ("--max_steps", "3", "--save_steps", "1", "--eval_steps", "0", "--eval_data", "", "--engine_replicas", "2")
SAMPLES_A_STEP = 32


def test_e5_a_run_whose_engines_always_die_ends_with_the_cause_and_goes_on_from_its_checkpoint(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    restarts = Restarts(server, task.words("rl", runs / "run", *WORDS), runs / "run")
    killed = runs / "killed"
    # in the second step: the first is saved
    ended = restarts.start([("kill_replicas_from", [SAMPLES_A_STEP + 5, str(killed)])]).wait()
    seconds = time.time() - killed.stat().st_mtime
    assert ended.code == SERVICE, ended.output[-3000:]
    print(f"\nE5: ended {seconds:.1f} s after the first replica was lost")
    assert seconds <= SECONDS_TO_END
    assert "replica" in ended.output
    assert "--engine_max_rows" in ended.output
    assert [path.name for path in checkpoints(runs / "run")] == ["step_000000", "step_000001"]
    restarts.finish()
    assert restarts.resumes == 1
    assert differences(references.run("rl", *WORDS), runs / "run") == []
