"""The checks that read the code: lint, format, types, import contracts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.xdist_group("static")
@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("pyright", "--pythonpath", sys.executable),
        ("lint-imports",),
        ("uv", "lock", "--check"),
    ],
    ids=["lint", "format", "types", "imports", "lock"],
)
def test_code_passes(command: tuple[str, ...]) -> None:
    program = BIN / command[0]
    words = [str(program) if program.exists() else command[0], *command[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
