"""The folders that hold a run's checkpoints: the one in the run, and others to which saves went that it refused.

The others are named in a file of the first, one absolute path a line, that is written while there is space: before
the run's first save. Each of them names the run in a file of its own. Whoever looks for a checkpoint looks in all.
"""

from __future__ import annotations

import re
from pathlib import Path

from rft_core.durable_files import replace_text

PLACES = "other_places.txt"
"""Name of the file, in the run's folder of checkpoints."""
RUN = "run.txt"
"""Name of the file with the path of the run, in a further folder."""
_MOST_BYTES = 65536
_STEP = re.compile(r"step_\d{1,15}")


def other_places(folder: Path) -> list[Path]:
    """Return the further folders that a folder of checkpoints names; none without a file of them that can be read."""
    # a relative path would mean another folder for every working directory
    return [place for line in _lines(folder / PLACES) if (place := Path(line)).is_absolute()]


def add_place(folder: Path, place: Path) -> None:
    """Name a further folder of checkpoints in the run's own `folder`, and the run in it; both exist.

    Raises:
        StorageError: the system refuses one of the two files.
    """
    run = folder.absolute().parent
    if run_of(place / "step_000000") != run:
        replace_text(place / RUN, f"{run}\n")
    known = other_places(folder)
    if place not in known:
        replace_text(folder / PLACES, "".join(f"{each}\n" for each in (*known, place)))


def run_of(checkpoint: Path) -> Path:
    """Return the directory of the run that a checkpoint's directory belongs to."""
    named = _lines(checkpoint.parent / RUN)
    return Path(named[0]) if named else checkpoint.parent.parent


def step_directories(folder: Path) -> list[Path]:
    """Return the directories that have the name of a checkpoint, in all folders, by step; one for each step.

    Their contents are not looked at. Where two folders have one of a step, it is the one of the first folder.
    """
    found: dict[str, Path] = {}
    for place in (*other_places(folder), folder):
        if place.is_dir():
            found |= {path.name: path for path in place.iterdir() if _STEP.fullmatch(path.name)}
    return [found[name] for name in sorted(found, key=lambda name: int(name.removeprefix("step_")))]


def _lines(file: Path) -> list[str]:
    try:
        with file.open(encoding="utf-8") as stream:
            return stream.read(_MOST_BYTES).splitlines()
    except (OSError, UnicodeDecodeError):
        return []
