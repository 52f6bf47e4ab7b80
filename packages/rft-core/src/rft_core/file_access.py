"""The first place on the way to a file that the user of a process may not enter or read."""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from pathlib import Path


def closed_place(path: Path) -> str:
    """Return the first place on the way to a file that this user may not enter or read, with its owner and mode.

    Directories have to be entered (x), and the file, or the directory that is named itself, to be read (r). Empty where
    nothing is closed, or the way ends before: what is not there is closed to nobody.

    Example: `user nobody (uid 65534) may not enter /data/raw, which belongs to root (uid 0) and has the mode
    drwx------`.
    """
    found = _closed(path)
    return "" if found is None else _refusal(*found)


def access_remedy(path: Path) -> str:
    """Return what opens the first closed place to this user: a command for its owner; empty where nothing is closed.

    Example: `chmod u+r rows.jsonl`, or of a place that belongs to another user `ask root (uid 0) for access (chmod o+rx
    /data/raw), or name a copy that you may read`.
    """
    found = _closed(path)
    if found is None:
        return ""
    deed, place, status = found
    rights = "rx" if stat.S_ISDIR(status.st_mode) else "r"
    if deed == "enter" and place != path.expanduser().absolute():
        rights = "x"
    named = shlex.quote(str(place))
    if status.st_uid == os.geteuid():
        return f"chmod u+{rights} {named}"
    owner = _user(status.st_uid)
    return f"ask {owner} for access (chmod o+{rights} {named}), or name a copy that you may read"


def _closed(path: Path) -> tuple[str, Path, os.stat_result] | None:
    """Return the first closed place on the way, with what this user may not do there."""
    target = path.expanduser().absolute()
    for place in [*reversed(target.parents), target]:
        try:
            found = place.stat()
        except OSError:
            return None
        is_directory = stat.S_ISDIR(found.st_mode)
        # the effective user: the one that opens files
        if (place != target or is_directory) and not os.access(place, os.X_OK, effective_ids=True):
            return "enter", place, found
        if place == target and not os.access(place, os.R_OK, effective_ids=True):
            return "read", place, found
    return None


def _refusal(deed: str, place: Path, found: os.stat_result) -> str:
    user, owner = _user(os.geteuid()), _user(found.st_uid)
    mode = stat.filemode(found.st_mode)
    return f"user {user} may not {deed} {place}, which belongs to {owner} and has the mode {mode}"


def _user(number: int) -> str:
    """Return a user by name, where the machine has one for the number."""
    try:
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    except KeyError:
        return f"uid {number}"
