"""Sizes in messages, free space, and what a refused save asks the user to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rft_core.errors import RftError
from rft_dist.checkpoints import storage_errors
from rft_dist.checkpoints.quotas import Quota
from rft_dist.checkpoints.storage_errors import free_bytes, gib, refused_opening, refused_save, too_little_space

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (GIB, "1.000 GiB"),
        (2**30 // 100, "0.010 GiB"),
        (2**23, "8 MiB"),
        (1331439, "1.27 MiB"),
        (2**20 // 100, "0.01 MiB"),
        (10, "0.00977 KiB"),
        (5 * GIB // 4, "1.250 GiB"),
    ],
)
def test_a_size_has_as_many_digits_as_it_needs(size: int, text: str) -> None:
    assert gib(size) == text


def test_free_space_is_what_this_user_can_still_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = SimpleNamespace(f_bavail=3, f_bfree=5, f_frsize=4096, f_bsize=512)
    asked: list[Path] = []
    monkeypatch.setattr(os, "statvfs", lambda path: asked.append(path) or system)
    assert free_bytes(tmp_path) == 3 * 4096
    assert asked == [tmp_path]


def errors(directory: Path, number: int, need: int = 8 * GIB) -> list[RftError]:
    error = OSError(number, os.strerror(number))
    return [refused_save(7, directory, need, error, 5), refused_opening(directory, error)]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "mount -o remount,rw"),
        (errno.EACCES, "give this user write access"),
        (errno.EPERM, "give this user write access"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "move the run"),
    ],
)
def test_every_refusal_has_its_remedy(tmp_path: Path, number: int, remedy: str) -> None:
    saving, opening = errors(tmp_path, number)
    assert (saving.problem.code, opening.problem.code) == ("checkpoint.save_refused", "checkpoint.folder_refused")
    for error in (saving, opening):
        assert error.problem.do.startswith(remedy)
        assert errno.errorcode[number] in error.problem.what
        assert error.problem.where == str(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("free", "room"), [(2 * GIB, "6.000 GiB"), (8 * GIB, "0.800 GiB"), (9 * GIB, "0.800 GiB"), (None, "8.000 GiB")]
)
def test_a_full_disk_needs_what_is_missing_or_a_tenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, free: int | None, room: str
) -> None:
    def look(_: Path) -> int:
        if free is None:
            raise OSError(errno.EIO, "broken")
        return free

    monkeypatch.setattr(storage_errors, "free_bytes", look)
    assert errors(tmp_path, number)[0].problem.do.startswith(f"free {room} on ")


def test_a_save_that_would_not_fit_says_by_how_much(tmp_path: Path) -> None:
    problem = too_little_space(7, tmp_path, 3 * GIB, GIB, None).problem
    assert problem.code == "checkpoint.too_little_space"
    assert problem.do.startswith("free 2.000 GiB on ")
    assert str(problem.state).startswith("no earlier checkpoint")
    assert "last good step 5" in str(too_little_space(7, tmp_path, 2, 1, 5).problem.state)


def test_a_quota_that_leaves_less_than_the_disk_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = Quota("user 1234", 10 * GIB, 9 * GIB)
    problem = too_little_space(7, tmp_path, 3 * GIB, 50 * GIB, 5, quota).problem
    assert problem.what.endswith("has 50.000 GiB (EDQUOT foreseen, quota of user 1234 10.000 GiB, 1.000 GiB left)")
    assert problem.do.startswith("free 2.000 GiB of the files of user 1234 on ")
    loose = too_little_space(7, tmp_path, 3 * GIB, GIB, 5, Quota("user 1234", 10 * GIB, GIB)).problem
    assert "ENOSPC foreseen" in loose.what
    assert loose.do.startswith("free 2.000 GiB on ")
    monkeypatch.setattr(storage_errors, "tightest_quota", lambda _: quota)
    monkeypatch.setattr(storage_errors, "free_bytes", lambda _: 50 * GIB)
    met = errors(tmp_path, errno.EDQUOT, need=3 * GIB)[0].problem
    assert "(EDQUOT, quota of user 1234 10.000 GiB, 1.000 GiB left)" in met.what
    assert met.do.startswith("free 2.000 GiB on ")


def test_a_disk_without_inodes_is_not_told_to_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(f_files=1000, f_favail=0, f_bavail=5, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    for error in errors(tmp_path, errno.ENOSPC):
        assert "df -i" in error.problem.do
        assert "GiB" not in error.problem.what
    assert "1,000 inodes" in errors(tmp_path, errno.ENOSPC)[0].problem.what
