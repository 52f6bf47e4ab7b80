"""What an installation of a package leaves on Python's path: its module, and the facts with its entry points."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def install(patch: pytest.MonkeyPatch, folder: Path, source: Path, *, package: str, entry_points: str) -> None:
    """Put a module and its package's facts into a folder, first on the path of this process and of its children."""
    shutil.copy(source, folder)
    facts = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(entry_points)
    patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
