"""Disk quotas of the user who saves: what a limit leaves, before a save meets it.

The kernel tells the quotas of local file systems (ext4, XFS, ...). Those of a network file system belong to its
server, which the system's `quota` command asks (Lustre: `lfs`). Without an answer nothing is known, and a save
meets the limit as the error EDQUOT.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_GETQUOTA = 0x800007
_USER, _GROUP = 0, 1
_BLOCK_BYTES = 1024  # of the limits, in the kernel's records and in the commands' output
_NETWORK = {"nfs": "quota", "nfs4": "quota", "lustre": "lfs"}
_SECONDS = 5.0
"""Longest wait for a command: a server that does not answer must not hold up training."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit on the bytes of one user or group on a file system."""

    owner: str
    """Whose: "user 1000" or "group 100"."""
    limit: int
    """Bytes that the owner may have."""
    used: int
    """Bytes that the owner has."""

    @property
    def left(self) -> int:
        """Bytes that can still be written."""
        return max(self.limit - self.used, 0)


class _Record(ctypes.Structure):
    """The kernel's `struct if_dqblk`."""

    _fields_ = (
        ("hard_limit", ctypes.c_uint64),
        ("soft_limit", ctypes.c_uint64),
        ("used_bytes", ctypes.c_uint64),
        ("inode_hard_limit", ctypes.c_uint64),
        ("inode_soft_limit", ctypes.c_uint64),
        ("used_inodes", ctypes.c_uint64),
        ("grace_ends", ctypes.c_uint64),
        ("inode_grace_ends", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class _Mount:
    device: str
    folder: str
    kind: str


def tightest_quota(path: Path) -> Quota | None:
    """Return the quota that leaves this process the fewest bytes on the file system of `path`; None for none known."""
    # the kernel holds no limit against the superuser
    if os.geteuid() == 0:
        return None
    mount = _mount_of(path)
    if mount is None:
        return None
    owners = ((_USER, os.geteuid()), (_GROUP, os.getegid()))
    if mount.kind in _NETWORK:
        found = [_from_command(_NETWORK[mount.kind], mount, owner, number) for owner, number in owners]
    else:
        found = [_from_kernel(mount.device, owner, number) for owner, number in owners]
    return min((quota for quota in found if quota is not None), key=lambda quota: quota.left, default=None)


def _from_kernel(device: str, owner: int, number: int) -> Quota | None:
    """Return a quota of a local file system; None where the kernel keeps none or does not tell it."""
    record = _Record()
    try:
        quotactl = ctypes.CDLL(None, use_errno=True).quotactl
    except (OSError, AttributeError):
        return None
    if quotactl(ctypes.c_int(_GETQUOTA << 8 | owner), os.fsencode(device), ctypes.c_int(number), ctypes.byref(record)):
        return None
    is_over = record.soft_limit and record.used_bytes >= record.soft_limit * _BLOCK_BYTES
    expired = bool(is_over and record.grace_ends and record.grace_ends <= time.time())
    return _quota(owner, number, record.hard_limit, record.soft_limit, record.used_bytes, expired=expired)


def _from_command(name: str, mount: _Mount, owner: int, number: int) -> Quota | None:
    """Return a quota of a network file system, as the command for it prints it; None where it has no answer."""
    program = shutil.which(name)
    if program is None:
        return None
    which = "-u" if owner == _USER else "-g"
    words = ["-w", "-p", which, "-f"] if name == "quota" else ["quota", "-q", which, str(number)]
    try:
        answer = subprocess.run(
            [program, *words, mount.folder],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = answer.stdout
    if name == "quota":  # it answers for all groups of a user, each under a heading
        _, _, text = text.partition(f"({'uid' if owner == _USER else 'gid'} {number}):")
        text, _, _ = text.partition("Disk quotas")
    words = text.split()
    for index, word in enumerate(words[:-3]):
        # a row begins with the file system: blocks in use (with a star beyond the soft limit), soft and hard limit
        if word in (mount.device, mount.folder):
            used, soft, hard = (figure.rstrip("*") for figure in words[index + 1 : index + 4])
            if not (used.isdecimal() and soft.isdecimal() and hard.isdecimal()):
                return None
            return _quota(owner, number, int(hard), int(soft), int(used) * _BLOCK_BYTES, expired=False)
    return None


def _quota(owner: int, number: int, hard: int, soft: int, used: int, *, expired: bool) -> Quota | None:
    """Return the limit in force: the hard one, or the soft one once its time of grace is over; None where it is 0."""
    limit = soft if expired else hard
    if not limit:
        return None
    return Quota(f"{'user' if owner == _USER else 'group'} {number}", limit * _BLOCK_BYTES, used)


def _mount_of(path: Path) -> _Mount | None:
    """Return the mount that holds `path`; None on a system without /proc."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        device = os.stat(path).st_dev
    except OSError:
        return None
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) > 4 and len(kinds) > 1 and fields[2] == number:
            return _Mount(_plain(kinds[1]), _plain(fields[4]), kinds[0])
    return None


def _plain(text: str) -> str:
    """Undo the octal escapes of mountinfo: a blank is written as \\040."""
    for code, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, sign)
    return text
