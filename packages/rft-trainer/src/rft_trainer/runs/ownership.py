"""Users who can write the files of a run, and who owns them.

A resume runs the code that config.yaml names, and takes the weights of the checkpoints: whoever can write there chooses
both. A group may write, as in the folder of a project; every user of a machine may not.
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
import tempfile
from pathlib import Path

from rft_core.errors import OptionsError

_OF_A_RESUME = ("", "config.yaml", "identity.json", "env.json", "command.txt", "checkpoints")
"""What a resume goes by, relative to the run."""


def refuse_writable(run: Path) -> None:
    """Refuse to continue a run that every user of the machine can write.

    A file system that keeps no modes, and shows one for all, says nothing of who can write.

    Raises:
        OptionsError: names the first such file or directory.
    """
    found = next((path for path in _files(run) if _is_writable(path)), None)
    if found is None or not _keeps_modes(run):
        return
    kind = "directory" if found.is_dir() else "file"
    raise OptionsError(
        code="resume.writable_by_others",
        what=f"every user of this machine can write the {kind} {found} (mode {stat.S_IMODE(found.stat().st_mode):04o})",
        where=str(found),
        why="a resume runs the code that config.yaml names, and whoever can write there chooses it",
        state="nothing was started; the run is untouched",
        do=f"look through {shlex.quote(str(run / 'config.yaml'))}, then chmod -R o-w {shlex.quote(str(run))}",
    )


def other_owner(run: Path) -> str:
    """Return the name of the user whose run it is; empty where it is one's own or of root."""
    owners = {path.stat().st_uid for path in _files(run)} - {os.geteuid(), 0}
    return _name(min(owners)) if owners else ""


def _files(run: Path) -> list[Path]:
    return [path for name in _OF_A_RESUME if (path := run / name).exists()]


def _is_writable(path: Path) -> bool:
    mode = path.stat().st_mode
    # in a directory such as /tmp, others may add files and replace none
    return bool(mode & stat.S_IWOTH) and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX)


def _keeps_modes(folder: Path) -> bool:
    """Return whether a file that is made for its owner alone is shown as such."""
    try:
        with tempfile.TemporaryFile(dir=folder) as made:
            return not os.fstat(made.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    except OSError:
        return True


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
