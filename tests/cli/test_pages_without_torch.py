"""Pages that compute nothing import no torch: a person waits for the answer, not for a library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rft_cli.records.discovery import commands

PROGRAM = """
import sys
from rft_cli.main import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers", "pyarrow", "numpy"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""
REFUSED = {
    "rl --rolout 3": 2,
    "sft --pretrain m --max_epochs 0": 2,
    "kto": 2,
    "dpo --pretrain m --loss_type simpo --label_smoothing 0.1": 2,
    "eval --fsdp": 2,
    "generate m --top_k x": 2,
}


@pytest.mark.parametrize("page", ["--help", "--version", "runs", "recipes", *(f"{name} --help" for name in commands())])
def test_a_page_imports_no_torch(page: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *page.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("words", REFUSED)
def test_settings_are_refused_without_torch(words: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == REFUSED[words], done.stderr
    assert "error" in done.stderr
    assert "Traceback" not in done.stderr
