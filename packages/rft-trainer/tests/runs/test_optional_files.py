"""What a run goes on without: said once a name, counted, and told by the verdict."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from rft_core.durable_files import storage_errors
from rft_trainer.runs.optional_files import OptionalFiles
from rft_trainer.runs.verdict import unwritten


def test_a_refusal_is_said_once_a_name_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    files = OptionalFiles()
    with caplog.at_level(logging.WARNING):
        for number in (3, 4):
            with files.tried("rollouts/", number), storage_errors("write", Path("/runs/a.jsonl")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with files.tried("Trackio"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        with files.tried("rollouts/"):
            pass
    assert files.lost == {"rollouts/": 7, "Trackio": 1}
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["rollouts/", "Trackio"]
    assert "/runs/a.jsonl" in caplog.records[0].getMessage()
    trackio, rollouts = unwritten(files)
    assert (trackio.code, rollouts.code) == ("rows_lost", "rows_lost")
    assert rollouts.what.startswith("7 rows of rollouts/ could not be written: cannot write /runs/a.jsonl: ENOSPC")
    assert trackio.what.startswith("1 row of Trackio ")


def test_a_run_that_wrote_all_has_no_such_finding() -> None:
    assert unwritten(OptionalFiles()) == []
