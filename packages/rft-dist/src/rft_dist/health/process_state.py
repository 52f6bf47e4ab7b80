"""State of a process on this machine that no longer answers."""

from __future__ import annotations

import os
from pathlib import Path

GONE = "gone"
STOPPED = "stopped"
ALIVE = "alive"
UNKNOWN = "unknown"


def this_machine(root: Path = Path("/proc")) -> str:
    """Equal for two processes only where one may judge the other by its process number and is not cut off from it.

    That takes the same boot of the same machine, and the same namespaces of processes and of the network:
    two containers may have one host name.
    """
    try:
        boot = (root / "sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(root / "self/ns" / name) for name in ("pid", "net")]
    except OSError:
        return f"{os.uname().nodename} {os.getpid()}"  # never equal to another's
    return " ".join([boot, *spaces])


def process_state(pid: int, root: Path = Path("/proc")) -> str:
    """`gone` (ended, or waiting to be reaped), `stopped` (SIGSTOP, a debugger), `alive`, or `unknown`."""
    if not root.is_dir():
        return _by_signal(pid)
    try:
        text = (root / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except OSError:
        return UNKNOWN
    state = text.rpartition(")")[2].split()[:1]  # the name before it may hold spaces and brackets
    if state in (["Z"], ["X"], ["x"]):
        return GONE
    return STOPPED if state in (["T"], ["t"]) else ALIVE


def _by_signal(pid: int) -> str:
    """Return the state of a process by signal 0, on systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return GONE
    except PermissionError:
        return ALIVE
    return ALIVE
