"""Lines and texts survive faults at every named instant, and numbers survive the round trip."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_core import fault_points
from rft_core.durable_files import (
    LineAppender,
    encode_record,
    kind_of,
    read_records,
    replace_text,
)
from rft_core.errors import StorageError

if TYPE_CHECKING:
    from support.durable_disk import DurableDisk


@pytest.fixture
def fail_at() -> Iterator[Callable[..., None]]:
    """Make the named instant fail with an error number, until the test ends."""

    def install(point: str, number: int = errno.ENOSPC) -> None:
        def hook(name: str) -> None:
            if name == point:
                raise OSError(number, os.strerror(number))

        fault_points.install(hook)

    yield install
    fault_points.install(None)


@given(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=5))
def test_floats_come_back_to_the_bit(record: dict[str, float]) -> None:
    assert json.loads(encode_record(record)) == record


def test_numbers_that_are_not_finite_become_null_and_are_named() -> None:
    record = {"step": 3, "loss": math.nan, "eval": {"a": math.inf, "b": 1.0}, "logprobs": [0.0, -math.inf]}
    line = encode_record(record)
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 3,
        "loss": None,
        "eval": {"a": None, "b": 1.0},
        "logprobs": [0.0, None],
        "non_finite": ["loss", "eval/a", "logprobs/1"],
    }
    assert "non_finite" not in encode_record({"loss": 0.5})


@given(st.text(alphabet=st.characters(), max_size=20))
def test_any_text_is_one_line_and_comes_back(text: str) -> None:
    line = encode_record({"text": text})
    assert b"\n" not in line.encode("utf-8")
    assert json.loads(line) == {"text": text}


def test_half_of_a_surrogate_pair_is_kept_as_an_escape() -> None:
    assert json.loads(encode_record({"text": "a\ud83d"}).encode("utf-8")) == {"text": "a\ud83d"}


def test_a_value_that_is_no_json_is_an_error() -> None:
    with pytest.raises(TypeError):
        encode_record({"loss": object()})


@pytest.mark.parametrize("sync_every", [0, 1, 3])
def test_appended_lines_are_read_back_across_appenders(tmp_path: Path, sync_every: int) -> None:
    file = tmp_path / "a.jsonl"
    for start in (0, 5):
        appender = LineAppender(file, sync_every=sync_every)
        for number in range(start, start + 5):
            appender.append({"n": number})
        appender.close()
        appender.close()
    assert [row["n"] for row in read_records(file).rows] == list(range(10))


@pytest.mark.parametrize("point", ["run.append", "run.appended"])
def test_a_line_that_the_disk_refused_is_taken_back(tmp_path: Path, fail_at: Callable[..., None], point: str) -> None:
    file = tmp_path / "a.jsonl"
    appender = LineAppender(file)
    appender.append({"n": 1})
    fail_at(point)
    with pytest.raises(StorageError, match="ENOSPC") as caught:
        appender.append({"n": 2})
    assert (caught.value.problem.code, caught.value.problem.where) == ("storage.full", str(file))
    fault_points.install(None)
    appender.append({"n": 3})
    assert [row["n"] for row in read_records(file).rows] == [1, 3]


def test_a_file_system_without_inodes_is_told_from_one_without_bytes(
    tmp_path: Path, fail_at: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(num_inodes: int, free_inodes: int, free_blocks: int, number: int = errno.ENOSPC) -> str:
        status = SimpleNamespace(f_files=num_inodes, f_favail=free_inodes, f_bavail=free_blocks)
        monkeypatch.setattr(os, "statvfs", lambda path: status)
        fail_at("run.replace", number)
        with pytest.raises(StorageError) as caught:
            replace_text(tmp_path / "no folder" / "a", "text")
        return caught.value.problem.do

    assert refused(1000, 0, 5) == f"df -i {tmp_path / 'no folder'}"
    for others in ((1000, 7, 0), (0, 0, 5), (1000, 0, 0), (1000, 0, 5, errno.EDQUOT)):
        assert refused(*others) == f"df -h {tmp_path / 'no folder'}"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_removed_while_it_is_written_is_begun_anew_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, replaced: bool
) -> None:
    file = tmp_path / "a.jsonl"
    appender = LineAppender(file)
    appender.append({"n": 1})
    assert not caplog.records
    file.unlink()
    if replaced:
        file.write_text('{"n": 7}\n')
    for number in (2, 3):
        appender.append({"n": number})
    appender.close()
    assert [row["n"] for row in read_records(file).rows] == ([7, 2, 3] if replaced else [2, 3])
    assert [str(file) in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("torn", [b'{"n": 2', b"x" * 200_000, b"\x00"])
def test_a_torn_last_line_is_cut_off_before_the_next_append(tmp_path: Path, torn: bytes) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"n": 1}\n' + torn)
    assert read_records(file).torn
    LineAppender(file).append({"n": 3})
    assert file.read_bytes() == b'{"n": 1}\n{"n": 3}\n'


def test_a_file_of_only_a_torn_line_starts_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"n": ')
    LineAppender(file).append({"n": 3})
    assert file.read_bytes() == b'{"n": 3}\n'


@pytest.mark.parametrize("point", ["run.replace", "run.rename"])
def test_a_replacement_that_fails_leaves_the_old_text_and_no_stray_file(
    tmp_path: Path, fail_at: Callable[..., None], point: str
) -> None:
    file = tmp_path / "a.txt"
    replace_text(file, "old")
    fail_at(point, errno.EIO)
    with pytest.raises(StorageError, match="EIO") as caught:
        replace_text(file, "new")
    assert caught.value.problem.code == "storage.refused"
    assert file.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_unreadable_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"n": 1}\nbad\n[1]\n\xff\n{"n": 2}\n{"n"')
    records = read_records(file)
    assert [row["n"] for row in records.rows] == [1, 2]
    assert (records.num_unreadable, records.torn) == (3, True)
    assert read_records(tmp_path / "none.jsonl").rows == ()


def test_a_replaced_text_is_on_the_disk_before_it_takes_its_name_and_its_name_before_the_call_ends(
    tmp_path: Path, durable_disk: DurableDisk
) -> None:
    file = tmp_path / "a.txt"
    replace_text(file, "old")
    names_at_each_step: list[bytes] = []
    durable_disk.after = lambda _: names_at_each_step.append(durable_disk.contents(file))
    replace_text(file, "new")
    assert durable_disk.contents(file) == b"new"
    assert set(names_at_each_step) == {b"old", b"new"}, "a power loss leaves one of the two, whole"
    assert [event.kind for event in durable_disk.events] == ["sync", "rename", "sync"] * 2
    assert all(event.unsynced == () for event in durable_disk.events)


def test_an_appended_line_is_on_the_disk_when_its_turn_to_be_synced_has_come(
    tmp_path: Path, durable_disk: DurableDisk
) -> None:
    every, third = tmp_path / "every.jsonl", tmp_path / "third.jsonl"
    appenders = LineAppender(every), LineAppender(third, sync_every=3)
    held: list[tuple[int, int]] = []
    for number in range(4):
        for appender in appenders:
            appender.append({"n": number})
        held.append((durable_disk.contents(every).count(b"\n"), durable_disk.contents(third).count(b"\n")))
    assert held == [(1, 0), (2, 0), (3, 3), (4, 3)]
    appenders[1].close()
    assert durable_disk.contents(third).count(b"\n") == 4


def test_what_is_at_a_path_is_told_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    kinds = {name: kind_of(tmp_path / name) for name in ("file", "", "pipe", "socket", "link", "broken", "nowhere")}
    assert list(kinds.values()) == [
        "a file",
        "a directory",
        "a pipe",
        "a socket",
        "a device",
        "not there",
        "not there",
    ]
