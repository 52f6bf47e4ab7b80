"""A job that is requeued three times without a newer checkpoint ends; anything else goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.process.restarts import FILE, Restart, end_without_progress, restart_of
from rft_core.errors import ExitCode, NoProgressError


class Ranks:
    """Rank 0 alone, or a rank that hears what rank 0 found."""

    def __init__(self, heard: bytes | None = None) -> None:
        self.heard, self.calls = heard, 0

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        self.calls += 1
        heard = self.heard if data is None else data
        assert heard is not None
        return heard


def requeued(path: Path, step: int | None, number: int = 1, job: str = "7") -> None:
    environment = {"SLURM_RESTART_COUNT": str(number), "SLURM_JOB_ID": job}
    end_without_progress(path, step, environment, Ranks(), is_first=True)


@pytest.mark.parametrize("step", [5, None])
def test_a_job_ends_after_three_restarts_from_the_same_checkpoint(tmp_path: Path, step: int | None) -> None:
    for number in (1, 2, 3):
        requeued(tmp_path, step, number)
    for number in (4, 5):
        with pytest.raises(NoProgressError) as caught:
            requeued(tmp_path, step, number)
        problem = caught.value.problem
        assert caught.value.exit_code == ExitCode.NO_PROGRESS == 93
        assert problem.what.startswith(f"job 7 was started again 3 times from {'step 5' if step else 'its start'}")
        assert problem.where.endswith(f"SLURM_RESTART_COUNT = {number}")
        assert f"rft-train resume {tmp_path}" in problem.do


def test_a_newer_checkpoint_another_job_or_a_person_begins_the_count_again(tmp_path: Path) -> None:
    for step in (5, 5, 5, 6, 6, 6, 5, 5, 5):
        requeued(tmp_path, step)
    requeued(tmp_path, 5, job="8")
    end_without_progress(tmp_path, 5, {"SLURM_JOB_ID": "8"}, Ranks(), is_first=True)
    (tmp_path / FILE).write_text("{")
    for _ in range(3):
        requeued(tmp_path, 5, job="8")
    # the note that could not be read counted as none: this is the fourth from one checkpoint
    with pytest.raises(NoProgressError, match="job 8 was started again 3 times"):
        requeued(tmp_path, 5, job="8")


def test_every_rank_ends_and_only_the_first_reads_the_note(tmp_path: Path) -> None:
    environment = {"TORCHELASTIC_RESTART_COUNT": "4", "TORCHELASTIC_RUN_ID": "elastic"}
    ranks = Ranks(b"1")
    with pytest.raises(NoProgressError, match="job elastic"):
        end_without_progress(tmp_path, 5, environment, ranks, is_first=False)
    end_without_progress(tmp_path, 5, environment, Ranks(b"0"), is_first=False)
    assert ranks.calls == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"SLURM_RESTART_COUNT": "0", "SLURM_JOB_ID": "7"}, None),
        ({"SLURM_RESTART_COUNT": "x", "SLURM_JOB_ID": "7"}, None),
        ({"SLURM_RESTART_COUNT": "2", "SLURM_JOB_ID": "7"}, Restart("7", "SLURM_RESTART_COUNT", 2)),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, Restart("", "TORCHELASTIC_RESTART_COUNT", 1)),
    ],
)
def test_a_restart_is_what_the_scheduler_says(environment: dict[str, str], found: Restart | None) -> None:
    assert restart_of(environment) == found
