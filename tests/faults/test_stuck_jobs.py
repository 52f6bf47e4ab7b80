"""R11: a job that is requeued and always ends before its next save is ended with exit code 93, and a person goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compare import differences
from support.references import KILLED, References
from support.runs import ForkServer, Prelude
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

SHORT = ("--max_steps", "2", "--save_steps", "1", "--eval_steps", "0", "--eval_data", "", "--no-async_save")
NO_PROGRESS = 93
KILL: Prelude = ("signal_at", ["rl.rolled_out", 1, "SIGKILL"])


def test_a_job_that_ends_before_its_next_save_is_ended_with_93_and_a_person_goes_on(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    run = runs / "run"
    first: Prelude = ("signal_at", ["rl.rolled_out", 2, "SIGKILL"])
    assert server.run(*task.words("rl", run, *SHORT), preludes=[first]).code == KILLED
    for count in range(1, 4):
        job = {"SLURM_RESTART_COUNT": f"{count}", "SLURM_JOB_ID": "17"}
        assert server.run("resume", str(run), environment=job, preludes=[KILL]).code == KILLED
    job = {"SLURM_RESTART_COUNT": "4", "SLURM_JOB_ID": "17"}
    ended = server.run("resume", str(run), environment=job)
    assert ended.code == NO_PROGRESS, ended.output[-3000:]
    assert "job 17 was started again 3 times from step 1 and came to no newer checkpoint" in ended.output
    server.must_finish("resume", str(run))
    assert differences(references.run("rl", *SHORT), run) == []
