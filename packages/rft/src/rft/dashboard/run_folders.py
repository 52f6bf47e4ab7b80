"""The folders that a dashboard may read, and the runs in them. A request names a run by a digest, never by a path."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from rft_core.errors import OptionsError
from rft_trainer.runs.reader import is_run

DEEPEST = 4
"""Folders between a given one and a run."""
MOST_RUNS = 2000
_MOST_FOLDERS = 20_000
_REST = 10.0
"""Times as long as a search took, until the next one."""
SHORT_FILES = (
    *("config.yaml", "recipe.yaml", "identity.json", "metrics.jsonl", "evals.jsonl", "summary.json", "command.txt"),
    *("env.json", "error.json", "numerics.jsonl", "rollouts", "checkpoints"),
)
"""Entries of a run that are read by name."""
_OF_A_RUN = {"checkpoints", "rollouts", "logs"}
"""Folders of a run without runs in them; beside them may be the run of an earlier stage."""


class RequestRefused(Exception):
    """A request that is not answered: its HTTP code, and why."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


class RunFolders:
    """Folders with runs in them.

    Example::

        folders = RunFolders([Path("runs")])
        {"1f0c...": Path("/home/me/runs/rl-2026-11-20-fox")} == folders.runs()
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        """Take folders that exist.

        Raises:
            OptionsError: one is no folder.
        """
        if not folders:
            raise _no_folder("no folder is named", Path())
        for folder in folders:
            if not folder.is_dir():
                what = f"{folder} is a file" if folder.exists() else f"{folder} does not exist"
                raise _no_folder(what, next(near for near in folder.absolute().parents if near.is_dir()))
        self.roots = list(dict.fromkeys(folder.resolve() for folder in folders))
        self.is_cut = False
        """Whether there are more runs, or more folders, than are looked at."""
        self._runs: dict[str, Path] = {}
        self._next_search = 0.0
        self._lock = threading.Lock()

    def runs(self) -> dict[str, Path]:
        """Return the runs by their digests, as the last search found them; a search that is old is repeated."""
        with self._lock:
            began = time.monotonic()
            if began >= self._next_search:
                self._runs = self._found()
                self._next_search = time.monotonic() + min(60.0, _REST * (time.monotonic() - began))
            return self._runs

    def run(self, digest: str) -> Path:
        """Return the run of a digest, whose files are in the folders.

        Raises:
            RequestRefused: no such run, or a file of it leads elsewhere.
        """
        path = self.runs().get(digest)
        if path is None:
            raise RequestRefused(404, "there is no such run in the folders of this dashboard")
        self.check(path)
        return path

    def check(self, run: Path) -> None:
        """Raise `RequestRefused` where an entry of a run is a link out of the folders, or no file."""
        for name in SHORT_FILES:
            entry = run / name
            if os.path.lexists(entry):
                self.inside(entry)

    def inside(self, path: Path) -> Path:
        """Return a path that is a file or a folder below the folders; raise `RequestRefused` for any other."""
        real = path.resolve()
        if not any(real == root or real.is_relative_to(root) for root in self.roots):
            raise RequestRefused(403, f"{path.name} leads out of the folders of this dashboard")
        # what a pipe or a device holds is never read: it may not end
        if real.exists() and not (real.is_file() or real.is_dir()):
            raise RequestRefused(403, f"{path.name} is no file")
        return real

    def place(self, run: Path) -> str:
        """Return where a run is: the folders from the given one down to it; empty for a run that was given itself."""
        for root in self.roots:
            if run.is_relative_to(root):
                return str(run.parent.relative_to(root.parent)) if run != root else ""
        return ""

    def _found(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        self.is_cut = False
        for looked, folder in enumerate(_folders(self.roots)):
            if looked == _MOST_FOLDERS or len(found) >= MOST_RUNS:
                self.is_cut = True
                break
            if is_run(folder):
                found[_digest(folder)] = folder
        return found


def _folders(roots: Iterable[Path]) -> Iterator[Path]:
    """Yield folders and those below them; never through a link."""
    waiting = [(root, 0) for root in roots]
    while waiting:
        folder, depth = waiting.pop(0)
        yield folder
        if depth == DEEPEST:
            continue
        try:
            with os.scandir(folder) as entries:
                names = sorted(
                    entry.name
                    for entry in entries
                    if not entry.name.startswith(".")
                    and entry.name not in _OF_A_RUN
                    and entry.is_dir(follow_symlinks=False)
                )
        except OSError:
            continue  # of another user, or removed just now
        waiting += [(folder / name, depth + 1) for name in names]


def _digest(path: Path) -> str:
    return sha256(os.fsencode(path)).hexdigest()[:20]


def _no_folder(what: str, near: Path) -> OptionsError:
    return OptionsError(
        code="dashboard.no_folder",
        what=what,
        where="--folders",
        why="runs are shown from folders that hold them, such as runs/",
        state="nothing was started",
        do=f"rft-train dashboard {near}" if near != Path(near.anchor) else "rft-train dashboard FOLDER",
    )
