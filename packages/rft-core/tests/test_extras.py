"""The command that a message prints for a missing package names an extra that the workspace has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rft_core.extras import install_command

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r'install_command\(["\'](\w+)["\']\)|--extra ([\w-]+)')


def test_every_extra_that_is_named_is_one_of_the_workspace() -> None:
    if not (ROOT / "uv.lock").is_file():
        pytest.skip("the package is tested alone")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")]
    named = {first or second for file in texts for first, second in NAMED.findall(file.read_text())}
    assert {"lora", "vllm", "vision", "deepspeed"} <= named
    assert named <= extras.keys()


def test_an_extra_is_added_to_the_others_and_brings_no_tools() -> None:
    assert install_command("lora") == "uv sync --no-dev --inexact --extra lora"
