"""Ranks of several stages wait for what the first one makes, for as long as a meeting would."""

from __future__ import annotations

from pathlib import Path
from threading import Timer

import pytest

from rft.process import stage_ranks as ranks


def test_one_process_starts_no_ranks(tmp_path: Path) -> None:
    assert ranks.started(["quickstart"], 1, tmp_path / "logs") is None
    assert not (tmp_path / "logs").exists()


def test_a_rank_waits_until_the_file_is_there(tmp_path: Path) -> None:
    file = tmp_path / "made"
    timer = Timer(0.1, file.touch)
    timer.start()
    ranks.wait_for(file)
    assert file.exists()
    timer.join()


def test_a_rank_waits_no_longer_than_for_a_meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setenv("RFT_START_TIMEOUT", "5")
    monkeypatch.setattr(ranks.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: None)
    ranks.wait_for(tmp_path / "never")
    assert next(now) == 6
