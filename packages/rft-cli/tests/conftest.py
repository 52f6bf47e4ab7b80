"""What the tests of the command line share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rft.config.schema import REQUIRED, schema
from rft_cli.config import recipes as catalog
from rft_cli.diagnostics import bundle


@pytest.fixture(autouse=True)
def clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in an empty directory, without the environment and the run of another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RFT_ERRORS", raising=False)
    monkeypatch.delenv("RFT_FAULT", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    bundle.remember_run_directory(None)


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of two recipes in place of the installed ones."""
    directory = tmp_path / "installed"
    directory.mkdir()
    (directory / "addition.yaml").write_text(
        "recipe:\n  command: rl\n  task: add numbers\n  hardware: 2 CPU cores\n  minutes: 2\n"
        "  expected: accuracy 0.1 -> 0.9\n  date: 2026-11-20\n"
        "n_samples_per_prompt: 4\nactor_learning_rate: 1e-4\n"
    )
    (directory / "spelling.yaml").write_text("recipe:\n  command: sft\n  task: spell words\nlearning_rate: 0.001\n")
    monkeypatch.setattr(catalog, "DIRECTORY", directory)
    return directory


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program in a process of its own."""

    def run(code: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *argv],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


BEYOND = {"genrec-recommend": ["--serve"], "genrec-data": ["--input", "i", "--items_file", "m"]}
"""What rules between the settings of a command ask for beside those without a default."""


@pytest.fixture
def needed_words() -> Callable[..., list[str]]:
    """The words that a command cannot do without, each with a value that is allowed, behind those that are given."""

    def words_of(command: str, *given: str) -> list[str]:
        words = list(given)
        for name, row in schema(command).items():
            if row.default is REQUIRED and f"--{name}" not in given:
                words += [f"--{name}", row.choices[0] if row.choices else "m"]
        return words + BEYOND.get(command, [])

    return words_of
