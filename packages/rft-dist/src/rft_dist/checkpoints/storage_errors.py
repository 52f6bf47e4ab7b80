"""Errors of a refused save: path, need, free space, the system's error, and what is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rft_core.durable_files import no_inode_left
from rft_core.errors import Problem, StorageError
from rft_dist.checkpoints.quotas import Quota, tightest_quota

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    errno.EROFS: "mount -o remount,rw for the file system of {path}",
    errno.EACCES: "give this user write access to {path}",
    errno.EPERM: "give this user write access to {path}",
    errno.EFBIG: "ulimit -f unlimited",
    errno.EMFILE: "ulimit -n 65536",
}


def free_bytes(path: Path) -> int:
    """Bytes that this user can still write on the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def refused_save(step: int, directory: Path, need: int, error: OSError, last_good: int | None) -> StorageError:
    """The error for an operation of a save that the system refused (template F37)."""
    name = errno.errorcode.get(error.errno or 0, "no errno")
    free, quota = _free_or_none(directory), tightest_quota(directory)
    what = f"cannot save step {step}: {directory} needs {gib(need)}, {_has(free)} ({name}, {_words_of(quota)})"
    inodes = no_inode_left(directory) if error.errno == errno.ENOSPC else None
    if inodes:
        what = f"cannot save step {step}: all {inodes:,} inodes of the file system of {directory} are in use ({name})"
    return StorageError(
        code="checkpoint.save_refused",
        what=what,
        where=str(error.filename or directory),
        why=f"{name}: {error.strerror or error}",
        state=_untouched(step, last_good),
        do=_remedy(error.errno or 0, directory, need, _room(free or 0, quota)),
    )


def refused_opening(directory: Path, error: OSError) -> StorageError:
    """The error for a folder that cannot be made, or in which a killed process's leftovers cannot be settled."""
    name = errno.errorcode.get(error.errno or 0, "no errno")
    return StorageError(
        code="checkpoint.folder_refused",
        what=f"cannot keep checkpoints in {directory} ({name})",
        where=str(error.filename or directory),
        why=f"{name}: {error.strerror or error}",
        state="existing checkpoints were left as they are",
        do=_remedy(error.errno or 0, directory, 0, None),
    )


def too_little_space(
    step: int, directory: Path, need: int, free: int, last_good: int | None, quota: Quota | None = None
) -> StorageError:
    """The error for a save that was not begun because it would not fit (template F37).

    `free` are the bytes of the file system and `quota` the limit on those of this user, if one is known.
    """
    by_quota = quota is not None and quota.left < free
    foreseen = f"{'EDQUOT' if by_quota else 'ENOSPC'} foreseen, {_words_of(quota)}"
    short = gib(need - _room(free, quota))
    return StorageError(
        code="checkpoint.too_little_space",
        what=f"cannot save step {step}: {directory} needs {gib(need)}, has {gib(free)} ({foreseen})",
        where=str(directory),
        why="a save begins only where all of its bytes fit beside the existing checkpoints",
        state=_untouched(step, last_good),
        do=f"free {short} of the files of {quota.owner} on the file system of {directory}"
        if by_quota and quota is not None
        else f"free {short} on the file system of {directory}",
    )


def refused_twice(first: Problem, second: Problem) -> StorageError:
    """The error for a save that neither the run's own folder nor the second one took."""
    return StorageError(
        code=first.code,
        what=f"{first.what}; and {second.what}",
        where=f"{first.where}; {second.where}",
        why=f"{first.why}; {second.why}",
        state=first.state,
        do=first.do,
    )


def gib(num_bytes: int) -> str:
    """ "1.234 GiB", in MiB or KiB below a hundredth of one."""
    if num_bytes >= 2**30 // 100:
        return f"{num_bytes / 2**30:.3f} GiB"
    return f"{num_bytes / 2**20:.3g} MiB" if num_bytes >= 2**20 // 100 else f"{num_bytes / 2**10:.3g} KiB"


def _free_or_none(directory: Path) -> int | None:
    try:
        return free_bytes(directory)
    except OSError:
        return None


def _room(free: int, quota: Quota | None) -> int:
    return free if quota is None else min(free, quota.left)


def _words_of(quota: Quota | None) -> str:
    return "no quota known" if quota is None else f"quota of {quota.owner} {gib(quota.limit)}, {gib(quota.left)} left"


def _has(free: int | None) -> str:
    return "free space unknown" if free is None else f"has {gib(free)}"


def _untouched(step: int, last_good: int | None) -> str:
    kept = "no earlier checkpoint" if last_good is None else f"last good step {last_good} untouched"
    return f"{kept}; step {step} was not acknowledged"


def _remedy(number: int, directory: Path, need: int, free: int | None) -> str:
    if number == errno.ENOSPC and no_inode_left(directory):
        return f"delete files on the file system of {directory}: df -i {directory} counts them"
    if number in _NO_ROOM:
        return f"free {gib(max(need - (free or 0), need // 10, 1))} on the file system of {directory}"
    return _REMEDIES.get(number, "move the run to a file system that works, from {path}").format(path=directory)
