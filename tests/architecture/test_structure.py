"""Every package ships what a package needs, and answers before torch is imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from architecture.source_tree import PACKAGE_FOLDERS, PACKAGES, ROOT


def test_every_package_of_the_workspace_is_installed_here() -> None:
    absent = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    assert not absent, f"tests of {absent} would not be collected"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_ships_what_a_package_needs(package: str) -> None:
    folder = PACKAGE_FOLDERS[package]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    module = importlib.import_module(package)
    assert module.__version__ == project["version"]
    assert f"## {project['version']}" in (folder / "CHANGELOG.md").read_text()
    assert len((folder / "README.md").read_text()) > 400, "a README says what the package is and how to use it alone"
    assert (folder / "src" / package / "py.typed").exists()
    assert (folder / "LICENSE").exists()
    assert list((folder / "tests").rglob("test_*.py")), "a package has tests of its own"


@pytest.mark.parametrize("package", PACKAGES)
def test_sibling_requirements_carry_bounds(package: str) -> None:
    project = tomllib.loads((PACKAGE_FOLDERS[package] / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        if requirement.startswith("rft-"):
            assert re.fullmatch(r"rft-[a-z]+>=\d+\.\d+,<\d+\.\d+", requirement), requirement


def test_settings_and_packages_import_no_torch() -> None:
    modules = [*PACKAGES, *(f"{m}.settings" for m in PACKAGES if importlib.util.find_spec(f"{m}.settings"))]
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_group_of_tests_stays_on_one_worker(tmp_path: Path) -> None:
    """Fixtures of a group are made once: what pytest-xdist promises, and some versions of pytest break."""
    (tmp_path / "test_group.py").write_text(
        "import os\nimport pytest\npytestmark = pytest.mark.xdist_group('one')\n"
        "@pytest.mark.parametrize('i', range(6))\n"
        "def test_write(i):\n    open(f'worker-{os.environ[\"PYTEST_XDIST_WORKER\"]}', 'w').close()\n"
    )
    words = ["-m", "pytest", "-q", "-p", "xdist", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "."]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # three processes start, each with all plugins
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.glob("worker-*"))) == 1


def test_pytest_goes_into_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    skipped = pytestconfig.getini("norecursedirs")
    files = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/**/test_*.py")]
    folders = {part for file in files for part in file.relative_to(ROOT).parts[:-1]}
    assert sorted(name for name in folders if any(fnmatch(name, pattern) for pattern in skipped)) == []
