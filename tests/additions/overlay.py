"""A copy of some packages in front of the installed ones, to which a test adds what a developer would add."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from rft_cli.main import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class Overlay:
    """Copies of packages in a folder that Python searches first."""

    folder: Path

    @classmethod
    def of(cls, folder: Path, packages: Sequence[str]) -> Overlay:
        """Copy packages of the workspace, by their import names."""
        for name in packages:
            source = ROOT / "packages" / name.replace("_", "-") / "src" / name
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        return cls(folder)

    def add_file(self, path: str, text: str) -> None:
        """Write a module that is not there yet."""
        assert not (self.folder / path).exists(), path
        (self.folder / path).write_text(text)

    def add_row(self, path: str, after: str, row: str) -> None:
        """Write one line below the only line `after` of a module."""
        file = self.folder / path
        lines = file.read_text().splitlines(keepends=True)
        [place] = [number for number, line in enumerate(lines) if line.strip() == after]
        lines.insert(place + 1, row + "\n")
        file.write_text("".join(lines))

    def run(self, words: Sequence[object]) -> subprocess.CompletedProcess[str]:
        """Run `rft-train` with these words on the copies."""
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM, *map(str, words)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
