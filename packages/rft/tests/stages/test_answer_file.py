"""The file of answers: what cannot be written is refused beforehand, with a place that can be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rft.stages.answer_file import refuse_unwritable, write_answers
from rft_core.errors import OptionsError


def remedy(output: str) -> str:
    with pytest.raises(OptionsError) as caught:
        refuse_unwritable(output)
    assert caught.value.problem.code == "output.not_writable"
    return caught.value.problem.do


def test_what_cannot_be_written_is_refused_with_a_place_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    assert remedy("folder") == "--output folder/answers.jsonl"
    assert remedy("absent/deep/a.jsonl") == f"mkdir -p {tmp_path}/absent/deep"
    assert remedy("file/a.jsonl") == "--output a.jsonl"
    for output in ("", "a.jsonl", "file", "folder/a.jsonl", "/dev/stdout"):
        refuse_unwritable(output)
    assert not (tmp_path / "a.jsonl").exists()


def test_what_the_user_may_not_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "mine").write_text("")
    # root may write everything, so that modes would tell nothing here
    closed = {tmp_path / "folder", Path("mine")}
    monkeypatch.setattr(os, "access", lambda path, mode: path not in closed)
    assert remedy("folder/a.jsonl") == "--output a.jsonl"
    assert remedy("mine") == "ls -ld mine"


def test_a_row_is_a_line(tmp_path: Path) -> None:
    write_answers(str(tmp_path / "a"), [{"a": 1}, {"a": "é"}])
    assert [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()] == [{"a": 1}, {"a": "é"}]
