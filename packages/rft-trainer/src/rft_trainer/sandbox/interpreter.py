"""The Python of the cage: a copy of this interpreter, its standard library and the shared libraries that they need.

A copy rather than the files themselves: it holds no package of anybody, nothing of the home directory in which an
interpreter often lies, and a user without rights can read it, which root's caged programs become.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rft_core.errors import PreflightError

_NOT_NEEDED = (
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip"),
    *("config-*", "distutils", "pydoc_data", "unittest", "_tkinter*", "_test*", "*.opt-?.pyc"),
)
"""Not copied: packages, tests, windows, and what builds or installs something."""
_PREFIX = "rft-cage-locked-"
"""Of copies whose process holds a lock on their folder. Copies without one, of older versions, are left alone."""
_LIBRARY = re.compile(r"(\S+) => (/\S+) \(0x")
_LOADER = re.compile(r"^\s*(/\S+) \(0x", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CagedPython:
    """The copy of the interpreter, and its place in the cage."""

    directory: Path
    """Holds `bin/python3`, `lib` with the shared libraries, and the standard library below `lib` or `lib64`."""
    loader: str
    """Path of the dynamic loader, which stands in the interpreter's own file; a copy of it is `lib/loader`."""


@cache
def caged_python() -> CagedPython:
    """Copy the interpreter, once a process; the copy is removed when the process ends.

    Copies of processes that were killed are removed first.

    Raises:
        PreflightError: the libraries of this interpreter cannot be listed.
    """
    remove_stale_copies(Path(tempfile.gettempdir()))
    directory = _locked_directory()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    standard_library = directory / sys.platlibdir / version
    source, interpreter = Path(sysconfig.get_path("stdlib")), Path(sys.executable).resolve()
    shutil.copytree(source, standard_library, ignore=shutil.ignore_patterns(*_NOT_NEEDED), symlinks=False)
    (directory / "bin").mkdir()
    (directory / "lib").mkdir(exist_ok=True)
    shutil.copy2(interpreter, directory / "bin" / "python3")
    loader = _copy_libraries([interpreter, *standard_library.glob("lib-dynload/*.so")], directory / "lib")
    for folder, _, files in os.walk(directory):
        os.chmod(folder, 0o755)
        for name in files:
            path = Path(folder, name)
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    return CagedPython(directory, loader)


def remove_stale_copies(folder: Path) -> None:
    """Remove the copies in a folder that belong to this user and to no living process.

    A process holds a lock on its copy's folder, which ends with the process however it ends, in whatever container it
    runs. Several processes may call this at once: one of them gets the lock of a stale copy and removes it.
    """
    for directory in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process was faster, or it is no folder
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # a removal that is interrupted leaves a folder that nobody holds, for the next start
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)


def _locked_directory() -> Path:
    """Make the folder of this process's copy, with a lock on it that is held until the process has ended."""
    made = Path(tempfile.mkdtemp(prefix=".rft-cage-"))
    # never closed: closing gives the lock back; programs that this process starts do not inherit it
    descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # a file system without locks, where nothing is found stale either
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    # it gets the name under which others look for stale copies only now that it is locked
    return made.rename(made.with_name(_PREFIX + made.name.removeprefix(".rft-cage-")))


def _copy_libraries(files: list[Path], into: Path) -> str:
    """Copy the shared libraries of the files, and return the path of their loader."""
    command = ["ldd", *map(str, files)]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    except OSError as error:
        raise _no_libraries(str(error)) from error
    loader = _LOADER.search(listed)
    if loader is None:
        raise _no_libraries(f"ldd {files[0]} names no dynamic loader")
    for name, path in sorted(set(_LIBRARY.findall(listed))):
        shutil.copy2(Path(path).resolve(), into / Path(name).name)
    shutil.copy2(Path(loader[1]).resolve(), into / "loader")
    (into / "loader").chmod(0o755)
    return loader[1]


def _no_libraries(reason: str) -> PreflightError:
    return PreflightError(
        code="sandbox.interpreter",
        what=f"the shared libraries of {sys.executable} cannot be listed: {reason}",
        where="--reward code",
        why="a submitted program is run by a copy of this interpreter that holds nothing else",
        do="install the program ldd (Debian: libc-bin) and an interpreter that is dynamically linked",
    )
