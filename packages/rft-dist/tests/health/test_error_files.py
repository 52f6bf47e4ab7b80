"""The error files in the folder of a run."""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from pathlib import Path

import pytest

from rft_core.errors import PeerError, RftError
from rft_dist.health import error_files
from rft_dist.health.error_files import RunFolder
from rft_dist.health.failure import Cause


def folder_at(path: Path) -> RunFolder:
    folder = RunFolder()
    folder.attach(path, "rft-train resume run")
    return folder


def test_the_error_file_is_whole_and_readable_by_others(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        folder_at(tmp_path).write_error(Cause("gone", 1, "w\u00e4hrend", ""))
    finally:
        os.umask(mask)
    file = tmp_path / "error.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    text = file.read_text(encoding="utf-8")
    assert "w\u00e4hrend" in text
    assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n", "a field a line"
    assert json.loads(text)["unix_time"] == pytest.approx(time.time(), abs=60)


def test_the_error_file_is_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(error_files.os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    folder_at(tmp_path).write_error(Cause("gone", 1, "w", ""))
    assert sizes == [(tmp_path / "error.json").stat().st_size]


def test_a_folder_that_is_not_there_or_cannot_be_written_is_no_further_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        folder = folder_at(path)
        folder.write_page("page")
        folder.write_error(Cause("gone", 1, "w", ""))
    assert {file.name for file in tmp_path.iterdir()} == {"error.json"}
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "stopped.txt").mkdir()
    folder_at(tmp_path).write_page("page")
    RunFolder().write_page("page")
    RunFolder().clear()


def test_a_new_start_clears_both_files_or_none(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    folder.clear()
    (tmp_path / "logs").mkdir()
    folder.write_error(Cause("gone", 1, "w", ""))
    folder.write_page("page")
    (tmp_path / "metrics.jsonl").write_text("")
    folder.clear()
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["logs", "metrics.jsonl"]


def test_last_words_are_logged_unless_there_is_another_way(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="rft_dist")
    error = PeerError(code="peer.late", what="it was late", where="w", why="y")
    folder = RunFolder()
    folder.last_words(error)
    assert "it was late" in caplog.text
    shown: list[RftError] = []
    folder.show = shown.append
    folder.last_words(error)
    assert shown == [error]

    def closed(error: RftError) -> None:
        raise ValueError("I/O operation on closed file")

    folder.show = closed
    folder.last_words(error)


def test_the_first_error_is_kept_in_the_run_folder_and_a_new_start_takes_it_away(tmp_path: Path) -> None:
    folder = RunFolder()
    folder.write_error(Cause("gone", 1, "before the folder is known", ""))
    folder.attach(tmp_path, "rft-train resume run")
    (tmp_path / "logs").mkdir()
    folder.write_error(Cause("gone", 1, "first", ""))
    folder.write_error(Cause("stopped", 2, "second", ""))
    folder.write_page("page\n")
    assert json.loads((tmp_path / "error.json").read_text())["what"] == "first"
    assert (tmp_path / "logs/stopped.txt").read_text() == "page\n"
    folder.clear()
    assert [path.name for path in tmp_path.rglob("*")] == ["logs"]
