"""What an extra brings stands beside what is installed: it replaces no package, and the next extra does not either."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
REPLACING = {"sglang": {"cuda-bindings", "huggingface-hub", "tokenizers", "transformers"}}
"""SGLang pins older versions of these."""


def locked(*words: str) -> dict[str, str]:
    """The version of each package that an installation with these options has, for this Python and system."""
    command = ["uv", "export", "--frozen", "--no-dev", "--no-hashes", "--no-emit-workspace", "--no-header", *words]
    exported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in exported.splitlines() if line[:1].isalnum()]
    wanted = [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate()]
    return {one.name: str(one.specifier) for one in wanted}


@pytest.fixture(scope="module")
def without_extras() -> dict[str, str]:
    return locked()


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_replaces_no_package(extra: str, without_extras: dict[str, str]) -> None:
    assert "torch" in without_extras
    versions = locked("--extra", extra)
    replaced = {name for name, before in without_extras.items() if versions.get(name) != before}
    assert replaced == REPLACING.get(extra, set())
