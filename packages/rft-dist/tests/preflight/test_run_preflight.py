"""What each rank brings to the comparison before a model loads, and the ranks that nobody started."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_core.errors import OptionsError
from rft_dist.launch.environment import ranks_from_environment
from rft_dist.planning.parallel_dims import BatchShare, SourcedNumber
from rft_dist.preflight import run_preflight
from rft_dist.preflight.compare_ranks import Subject
from rft_dist.preflight.run_preflight import Preflight, RequestedRun, refuse_one_process

ONE = SourcedNumber(1, "default")
TWO = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}


def request(folder: Path) -> RequestedRun:
    """A run in `folder` whose model has a configuration."""
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text("{}")
    return RequestedRun(
        directory=folder / "run",
        nproc=SourcedNumber(0, "default"),
        share=BatchShare("train_batch_size", 8, 2),
        sp_size=ONE,
        tp_size=ONE,
        values={"seed": 4},
        models=lambda: {"pretrain": str(folder / "m")},
        files={"prompt_data 1": "a.jsonl"},
    )


def test_one_process_compares_nothing_and_several_compare_settings_code_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Subject] = []
    monkeypatch.setattr(run_preflight, "compare_ranks", lambda store, ranks, subject, seconds: seen.append(subject))
    asked = request(tmp_path)
    preflight = Preflight(asked)
    assert preflight.run == tmp_path / "run"
    grid = preflight.grid(ranks_from_environment(TWO), num_devices=0, shares_devices=False)
    assert grid.world_size == 2
    preflight.compare(None)  # type: ignore[arg-type]
    (subject,) = seen
    assert subject.facts["setting seed"] == "4"
    assert {"python", "package torch", "code rft_dist", "pretrain: model config.json"} <= set(subject.facts)
    assert not [name for name in subject.facts if name.startswith("file ")], "one machine has one file"
    assert subject.run_directory == tmp_path / "run"
    alone = Preflight(asked)
    assert alone.grid(ranks_from_environment({}), num_devices=0, shares_devices=False).world_size == 1
    report = alone.report()
    assert (report.grid.world_size, report.comparison, report.note) == (1, None, "")


def test_a_job_that_forgot_srun_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight = Preflight(request(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    preflight.grid(ranks_from_environment({}), num_devices=0, shares_devices=False)
    assert preflight.report().note.startswith("SLURM_NTASKS=16, and this is one process")


def test_ranks_that_nobody_started_are_refused_with_a_command_that_starts_them() -> None:
    nproc = SourcedNumber(4, "command line")
    with pytest.raises(OptionsError) as caught:
        refuse_one_process(nproc, ranks_from_environment({}))
    assert caught.value.problem.code == "launch.nproc_elsewhere"
    assert caught.value.problem.where == "command line"
    assert caught.value.problem.do == "torchrun --nproc_per_node=4 ..."
    refuse_one_process(nproc, ranks_from_environment(TWO))
    refuse_one_process(SourcedNumber(0, "default"), ranks_from_environment({}))
