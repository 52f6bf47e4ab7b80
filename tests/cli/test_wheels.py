"""The wheels of all packages in an empty environment: the command starts in any directory.

Slow, and it builds with hatchling, which `uv` fetches where it is not cached: at night.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from architecture.source_tree import ROOT

PACKAGES = sorted(
    path.parent.name for path in [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "kernels/pyproject.toml"]
)


def called(*words: object, folder: Path, **variables: str) -> str:
    """Output of a program that must succeed, in a directory."""
    # what tells a Python of this checkout would hide what the wheels lack
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheels, and the libraries of this one behind them."""
    folder = tmp_path_factory.mktemp("wheels")
    called("uv", "build", "--all-packages", "--wheel", "--out-dir", folder / "dist", folder=ROOT)
    wheels = sorted((folder / "dist").glob("*.whl"))
    assert len(wheels) == len(PACKAGES)
    called("uv", "venv", "--python", sysconfig.get_path("scripts") + "/python", folder / "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    called("uv", "pip", "install", "--offline", "--no-deps", "--python", python, *wheels, folder=folder)
    site = Path(called(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    # a path of a .pth file is searched last, and the .pth files in it, which name this checkout, are not read
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv"


@pytest.mark.night
@pytest.mark.parametrize("place", ["/", "here", "with space"])
def test_the_command_of_the_wheels_starts_in_any_directory(environment: Path, tmp_path: Path, place: str) -> None:
    folder = Path(place) if place == "/" else tmp_path / place
    folder.mkdir(exist_ok=True)
    command = environment / "bin" / "rft-train"
    assert called(command, "--version", folder=folder).strip()
    for words in (["--help"], ["rl", "--help"], ["genrec", "sft", "--help"]):
        assert "usage" in called(command, *words, folder=folder).lower()


@pytest.mark.night
def test_every_package_is_imported_from_its_wheel(environment: Path, tmp_path: Path) -> None:
    names = [name.replace("-", "_") for name in PACKAGES if name != "kernels"]
    code = "import importlib, json, sys\n"
    code += "print(json.dumps([importlib.import_module(name).__file__ for name in sys.argv[1:]]))"
    files = json.loads(called(environment / "bin" / "python", "-c", code, *names, "rft_kernels", folder=tmp_path))
    assert [file for file in files if not Path(file).is_relative_to(environment)] == []
