"""Asking a run for a profile: where nobody would record one the request is refused, and none is left behind."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rft.process.profile_request import request_profile
from rft.process.stack_dumps import StackDumps, last_process
from rft_core.errors import DataError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_a_run_without_a_rank_is_refused(run: Path) -> None:
    with pytest.raises(DataError) as refused:
        request_profile(run)
    assert (refused.value.problem.code, refused.value.problem.do) == ("run.no_profile", f"rft-train runs show {run}")
    assert not (run / "profile").exists()


def test_a_rank_that_trains_is_asked_and_one_that_is_gone_is_not(run: Path) -> None:
    dumps = StackDumps(0)
    dumps.attach(run)
    file = run / "logs" / "stacks_rank_0.txt"
    process = last_process(file)
    assert process is not None
    assert request_profile(run, 2) == process
    assert json.loads((run / "profile" / "request.json").read_text()) == {"steps": 2}
    with pytest.raises(DataError, match="0 steps") as refused:
        request_profile(run, 0)
    assert refused.value.problem.do.endswith("--steps 1")
    elsewhere = replace(process, machine="another", host="far", pid=1)
    file.write_text(f"process {json.dumps(asdict(elsewhere))}\n")
    assert request_profile(run).host == "far", "a folder may be shared"
    file.write_text(f"process {json.dumps(asdict(replace(process, started='1')))}\n")
    with pytest.raises(DataError, match="can be profiled") as refused:
        request_profile(run)
    assert "is gone" in refused.value.problem.why
    dumps.close()
