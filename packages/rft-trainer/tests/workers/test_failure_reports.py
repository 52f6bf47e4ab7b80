from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rft_trainer.records.scores import RewardStatus, Score
from rft_trainer.workers.failure_reports import FailureReports


def failed(detail: str, failure: str = "exception") -> Score:
    return Score(None, RewardStatus.FAILED, detail=detail, failure=failure)


def test_the_first_of_each_kind_and_place_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    reports = FailureReports("own.py:f", Path("run/logs/reward-0.log"))
    with caplog.at_level(logging.WARNING):
        reports.report(failed("ValueError: a"), place="own.py:3", traceback="Traceback: three")
        reports.report(failed("ValueError: b"), place="own.py:3", traceback="Traceback: three")
        reports.report(failed("ValueError: c"), place="own.py:9", traceback="Traceback: nine")
        reports.report(failed("f returned 'None'", "none"))
        reports.report(Score(None, RewardStatus.TIMEOUT, detail="no answer"))
        reports.report(Score(None, RewardStatus.TIMEOUT, detail="no answer again"))
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" (")[2].partition(")")[0] for text in said] == ["exception", "exception", "none", "timeout"]
    assert "ValueError: a" in said[0]
    assert "run/logs/reward-0.log" in said[0]
    assert said[0].endswith("\nTraceback: three")


def test_no_more_than_ten_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    reports = FailureReports("own.py:f")
    with caplog.at_level(logging.WARNING):
        for line in range(20):
            reports.report(failed("ValueError"), place=f"own.py:{line}")
    assert len(caplog.records) == 10
