"""This process's own folder in shared memory or the temporary directory, and the end of those that killed ones left.

The name holds user, machine start (boot id), container (pid namespace), process and a random word, so that no two
users, containers or runs ever mean the same file; only the user may look into it. The process holds a lock on its
folder, which the kernel takes back when it ends in whatever way: a folder of the same user and the same start of the
machine whose lock is free belongs to nobody any more. That holds across containers, which share locks but not
process numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
from pathlib import Path

_UNFINISHED = ".rft-unfinished-"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc")
_NAMESPACE = _PROCESSES / "self/ns/pid"

_LOCK = threading.Lock()
_OWN: dict[Path, tuple[Path, int]] = {}
"""Parent -> folder there and the descriptor that holds its lock."""


def private_folder(parent: Path) -> Path:
    """Return this process's folder in `parent`, made when it is first asked for; leftovers go at that moment."""
    with _LOCK:
        if parent not in _OWN:
            remove_leftovers(parent)
            _OWN[parent] = _make(parent)
        return _OWN[parent][0]


def remove_empty_folders() -> None:
    """Remove those of this process's folders that hold nothing; they are made again when one is needed."""
    with _LOCK:
        for parent, (folder, descriptor) in list(_OWN.items()):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
                del _OWN[parent]
                os.close(descriptor)


def remove_leftovers(parent: Path) -> None:
    """Remove folders in `parent` whose owner, a process of this user on this machine, is proven to be gone."""
    boot = _boot()
    if not boot:  # nothing could be proven
        return
    for folder in parent.glob(f"{_prefix(boot)}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or of another user under this one's name
            if folder.lstat().st_uid == os.geteuid() and not _is_process(folder.name):
                _remove_unlocked(folder)


def _make(parent: Path) -> tuple[Path, int]:
    # named last: a folder that can be found by its name is locked
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))
    descriptor = os.open(unfinished, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a file system without locks: its folders are never taken for leftovers
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    word = unfinished.name.removeprefix(_UNFINISHED)
    owner = f"{_namespace()}-{os.getpid()}-{_start_of(os.getpid())}"
    folder = parent / f"{_prefix(_boot() or 'unknown')}{owner}-{word}"
    unfinished.rename(folder)
    return folder, descriptor


def _remove_unlocked(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_process(name: str) -> bool:
    """Return True where the name is that of a process of this container that runs."""
    namespace, pid, start, _ = (name.removeprefix(_prefix(_boot())) + "---").split("-", 3)
    return namespace == _namespace() and bool(start) and start == _start_of(int(pid) if pid.isdecimal() else 0)


def _prefix(boot: str) -> str:
    return f"rft-{os.geteuid()}-{boot}-"


def _boot() -> str:
    """Return a word for this start of this machine; empty where the system does not tell."""
    try:
        return hashlib.blake2b(_BOOT.read_bytes(), digest_size=4).hexdigest()
    except OSError:
        return ""


def _namespace() -> str:
    """Return the number of this container's process numbers, 0 where the system does not tell."""
    try:
        return str(_NAMESPACE.stat().st_ino)
    except OSError:
        return "0"


def _start_of(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; empty where there is none."""
    try:
        # behind the program's name, which may hold spaces and brackets
        return (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _remove_own() -> None:
    """Remove this process's folders with what is in them."""
    with _LOCK:
        for folder, descriptor in _OWN.values():
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
        _OWN.clear()


def _forget_in_child() -> None:
    """Leave the folders to the parent; its lock stays, as this closes a copy of the descriptor."""
    for _, descriptor in _OWN.values():
        os.close(descriptor)
    _OWN.clear()
    _LOCK.release()


atexit.register(_remove_own)
# no other thread is in the middle of a change when a child gets its copy
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_forget_in_child)
