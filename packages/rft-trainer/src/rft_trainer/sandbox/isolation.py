"""The proof, at the start, that the cage holds on this machine; without it nothing is run."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from rft_core.errors import PreflightError
from rft_trainer.sandbox.cage import CageEnd, CageLimits, CageRun, run_cages
from rft_trainer.sandbox.cage_main import decode, encode
from rft_trainer.sandbox.interpreter import CagedPython, caged_python
from rft_trainer.sandbox.system_calls import has_filter

_INSTALL = "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora), version 0.8 or newer"
_SWITCHES = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)
"""Settings of a kernel that keep a user from making namespaces: file, the value that does, and what changes it."""
_CONTAINER = (
    "allow user namespaces here; in a container, start it with --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined"
)

_PROBE = """
def probe(files, port):
    import os, socket, threading, ctypes
    found = {}
    def tried(name, function):
        try:
            found[name] = function()
        except BaseException as error:
            found[name] = None
    tried("read", lambda: [name for name in files if os.path.exists(name)])
    tried("write", lambda: open("/python/rft", "w").write("x"))
    tried("connect", lambda: socket.create_connection(("127.0.0.1", port), 1.0).close() or True)
    tried("processes", lambda: os.listdir("/proc"))
    tried("fork", lambda: os.fork() or os._exit(0))
    own = {"LD_LIBRARY_PATH", "PYTHONHASHSEED", "MALLOC_ARENA_MAX", "PWD"}
    tried("variables", lambda: sorted(set(os.environ) - own))
    tried("namespace", lambda: ctypes.CDLL(None).unshare(0x10000000) == 0)
    tried("memory", lambda: len(bytearray(1 << 40)))
    thread = threading.Thread(target=lambda: found.update(thread=True))
    thread.start()
    thread.join()
    return found
"""
_CONTAINED = {
    "read": [],
    "write": None,
    "connect": None,
    "processes": None,
    "fork": None,
    "variables": [],
    "namespace": False,
    "memory": None,
    "thread": True,
}
_LIMITS = CageLimits(cpu_seconds=10, memory_bytes=512 << 20, wall_seconds=60.0)


def proven_python() -> CagedPython:
    """Return the interpreter of the cage, after a program in it has tried the walls from inside.

    Raises:
        PreflightError: something is missing here, or a wall does not hold.
    """
    _require_programs()
    python = caged_python()
    with closing(socket.create_server(("127.0.0.1", 0))) as server, tempfile.NamedTemporaryFile() as canary:
        os.chmod(canary.name, 0o644)
        files = ["/etc/passwd", "/proc/self", "/sys", "/root", "/usr", str(Path.home()), sys.prefix, canary.name]
        port = server.getsockname()[1]
        request = {"call": "probe", "args": [encode(files), encode(port)], "kwargs": []}
        [run] = run_cages(python, [(_LIMITS, _PROBE, [request])], at_once=1)
    _require_walls(run)
    return python


def _require_walls(run: CageRun) -> None:
    if run.end is not CageEnd.DONE:
        raise _no_cage(run.reason)
    found = _found(run)
    broken = sorted(name for name, wanted in _CONTAINED.items() if found.get(name, "absent") != wanted)
    if broken:
        shown = ", ".join(f"{name} gave {found.get(name, 'nothing')!r}"[:120] for name in broken)
        raise PreflightError(
            code="sandbox.open",
            what=f"the sandbox does not hold on this machine: {shown}",
            where="--reward code",
            why="programs that a model wrote are run where nothing outside can be reached, or not at all",
            do="run it on a machine whose kernel separates namespaces, where rft-train doctor finds the sandbox sound",
        )


def _found(run: CageRun) -> dict[str, Any]:
    reply = run.replies[0]
    if "value" not in reply:
        raise _no_cage(str(reply.get("error", "")))
    found: Any = decode(reply["value"])
    return dict(found) if isinstance(found, dict) else {}


def _require_programs() -> None:
    if not sys.platform.startswith("linux") or not has_filter():
        raise PreflightError(
            code="sandbox.machine",
            what=f"this machine is {sys.platform} {platform.machine()}",
            where="--reward code",
            why="the sandbox is made of namespaces of Linux and of a filter for x86_64 and aarch64",
            do="run it on Linux, x86_64 or aarch64",
        )
    program = shutil.which("bwrap")
    if program is None:
        raise _missing("the program bwrap of bubblewrap is not installed")
    options = subprocess.run([program, "--help"], capture_output=True, text=True, check=False, timeout=60)
    if "--disable-userns" not in options.stdout + options.stderr:
        raise _missing(f"{program} is older than bubblewrap 0.8, which can keep a program from making namespaces")


def _missing(what: str) -> PreflightError:
    return PreflightError(
        code="sandbox.missing",
        what=what,
        where="--reward code",
        why="programs that a model wrote are run in a sandbox, and without one not at all",
        do=_INSTALL,
    )


def _no_cage(reason: str) -> PreflightError:
    return PreflightError(
        code="sandbox.no_namespaces",
        what=f"the sandbox does not start: {reason or 'no answer from it'}",
        where="--reward code",
        why="bubblewrap separates a program by namespaces of its own, which this machine has to allow",
        do=_mend(),
    )


def _mend() -> str:
    for path, value, command in _SWITCHES:
        with suppress(OSError):
            if Path(path).read_text().strip() == value:
                return command
    return _CONTAINER
