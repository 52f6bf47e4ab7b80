"""Quotas as the kernel and the commands of network file systems tell them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from rft_dist.checkpoints import quotas
from rft_dist.checkpoints.quotas import Quota, tightest_quota

KIB = 1024
USER, GROUP = 1234, 567


@pytest.fixture(autouse=True)
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    monkeypatch.setattr(os, "getegid", lambda: GROUP)


def mounted(monkeypatch: pytest.MonkeyPatch, device: str, folder: str, kind: str) -> None:
    monkeypatch.setattr(quotas, "_mount_of", lambda _: quotas._Mount(device, folder, kind))


def kernel(monkeypatch: pytest.MonkeyPatch, records: dict[tuple[int, int], dict[str, int]]) -> list[bytes]:
    """A kernel with these records, by (kind of owner, number); returns the devices that it was asked for."""
    asked: list[bytes] = []

    class Library:
        @staticmethod
        def quotactl(command: Any, device: bytes, number: Any, place: Any) -> int:
            asked.append(device)
            assert (command.value & 0xFFFFFFFF) >> 8 == 0x800007, "Q_GETQUOTA"
            record = records.get((command.value & 0xFF, number.value))
            for name, value in (record or {}).items():
                setattr(place._obj, name, value)
            return 0 if record is not None else -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library)
    return asked


def test_the_record_has_the_layout_of_the_kernel() -> None:
    assert ctypes.sizeof(quotas._Record) == 72
    assert quotas._Record.used_bytes.offset == 16
    assert quotas._Record.grace_ends.offset == 48


def test_the_owner_with_the_fewest_bytes_left_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounted(monkeypatch, "/dev/vda1", "/", "ext4")
    user = {"hard_limit": 100, "used_bytes": 40 * KIB}
    group = {"hard_limit": 50, "used_bytes": 30 * KIB}
    asked = kernel(monkeypatch, {(0, USER): user, (1, GROUP): group})
    assert tightest_quota(tmp_path) == Quota(f"group {GROUP}", 50 * KIB, 30 * KIB)
    assert asked == [b"/dev/vda1"] * 2
    group["hard_limit"] = 0
    assert tightest_quota(tmp_path) == Quota(f"user {USER}", 100 * KIB, 40 * KIB)
    assert Quota(f"user {USER}", 100 * KIB, 40 * KIB).left == 60 * KIB


@pytest.mark.parametrize(("grace_ends", "left"), [(0, 60 * KIB), (2**40, 60 * KIB), (1, 0)])
def test_a_soft_limit_holds_once_its_time_of_grace_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, grace_ends: int, left: int
) -> None:
    mounted(monkeypatch, "/dev/vda1", "/", "ext4")
    record = {"hard_limit": 100, "soft_limit": 30, "used_bytes": 40 * KIB, "grace_ends": grace_ends}
    kernel(monkeypatch, {(0, USER): record})
    found = tightest_quota(tmp_path)
    assert found is not None
    assert found.left == left


def test_no_answer_and_the_superuser_have_no_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounted(monkeypatch, "/dev/vda1", "/", "ext4")
    kernel(monkeypatch, {})
    assert tightest_quota(tmp_path) is None
    kernel(monkeypatch, {(0, 0): {"hard_limit": 1}, (1, GROUP): {"hard_limit": 1}})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert tightest_quota(tmp_path) is None


def program(folder: Path, name: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / name
    file.write_text(f'#!/bin/sh\necho "$@" >> {folder}/{name}.words\ncat <<"EOF"\n{output}EOF\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


QUOTA = """Disk quotas for {kind} {name} ({short} {number}):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/other      7       8       9       0       1       0       0       0
server:/home    {used}    500    1000       0       1       0       0       0
"""


def test_the_quota_of_nfs_is_that_of_its_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounted(monkeypatch, "server:/home", "/home", "nfs4")
    user = QUOTA.format(kind="user", name="joe", short="uid", number=USER, used="600*")
    others = QUOTA.format(kind="group", name="other", short="gid", number=GROUP + 1, used="999")
    program(tmp_path, "quota", user + others, monkeypatch)
    assert tightest_quota(tmp_path) == Quota(f"user {USER}", 1000 * KIB, 600 * KIB)
    assert (tmp_path / "quota.words").read_text().splitlines() == ["-w -p -u -f /home", "-w -p -g -f /home"]


def test_the_quota_of_lustre_is_asked_of_lfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounted(monkeypatch, "10.0.0.1@tcp:/lustre", "/scratch", "lustre")
    program(
        tmp_path,
        "lfs",
        "       /scratch     472*    400     500   6d23h      16       0       0       -\n",
        monkeypatch,
    )
    found = tightest_quota(tmp_path)
    assert found is not None
    assert (found.limit, found.left) == (500 * KIB, 28 * KIB)
    words = (tmp_path / "lfs.words").read_text().splitlines()
    assert words == [f"quota -q -u {USER} /scratch", f"quota -q -g {GROUP} /scratch"]


@pytest.mark.parametrize("output", ["", "Disk quotas for user joe (uid 1234): none\n", "server:/home what is this\n"])
def test_an_answer_without_a_row_is_no_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str) -> None:
    mounted(monkeypatch, "server:/home", "/home", "nfs")
    program(tmp_path, "quota", output, monkeypatch)
    assert tightest_quota(tmp_path) is None


def test_a_command_that_is_not_installed_or_hangs_is_no_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounted(monkeypatch, "server:/home", "/home", "nfs")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tightest_quota(tmp_path) is None
    monkeypatch.setattr(quotas, "_SECONDS", 0.05)
    file = tmp_path / "quota"
    file.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    file.chmod(0o755)
    assert tightest_quota(tmp_path) is None


def test_the_mount_of_a_path_is_found_by_its_device(tmp_path: Path) -> None:
    found = quotas._mount_of(tmp_path)
    if found is None:  # a file system whose files have another device number than its mount
        return
    device = os.stat(tmp_path).st_dev
    assert os.stat(found.folder).st_dev == device
    assert quotas._mount_of(tmp_path / "absent") is None
    assert quotas._plain("/a\\040b") == "/a b"
