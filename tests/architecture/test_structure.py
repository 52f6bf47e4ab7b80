"""What design rules say of the tree: what imports what, what each package ships, what code may not contain."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [*sorted((ROOT / "packages").iterdir()), ROOT / "kernels"]
SOURCES = sorted(path for package in PACKAGES for path in (package / "src").rglob("*.py"))

ONLY_IN = {
    "transformers": "rft_models",
    "tokenizers": "rft_models",
    "vllm": "rft_engine",
    "sglang": "rft_engine",
    "deepspeed": "rft_dist",
    "triton": "rft_kernels",
    "wandb": "rft_trainer/sinks",
    "trackio": "rft_trainer/sinks",
    "tensorboard": "rft_trainer/sinks",
    "rich": "rft_cli",
    "tyro": "rft_cli",
    "pydantic": "rft_cli",
    "yaml": "rft_cli",
}


def imported(tree: ast.AST) -> set[str]:
    """Every module that a file names in an import, at the top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_package_of_the_workspace_is_installed_here() -> None:
    absent = [p.name for p in PACKAGES if importlib.util.find_spec(module_name(p)) is None]
    assert not absent, f"tests of {absent} would not be collected"


def module_name(package: Path) -> str:
    return "rft_kernels" if package.name == "kernels" else package.name.replace("-", "_")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_a_package_ships_what_a_package_needs(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    module = importlib.import_module(module_name(package))
    assert module.__version__ == project["version"]
    assert f"## {project['version']}" in (package / "CHANGELOG.md").read_text()
    assert len((package / "README.md").read_text()) > 400, "a README says what the package is and how to use it alone"
    assert (package / "src" / module_name(package) / "py.typed").exists()
    assert (package / "LICENSE").exists()
    assert list((package / "tests").rglob("test_*.py")), "a package has tests of its own"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_sibling_requirements_carry_bounds(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        if requirement.startswith("rft-"):
            assert re.fullmatch(r"rft-[a-z]+>=\d+\.\d+,<\d+\.\d+", requirement), requirement


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: "/".join(p.parts[-3:]))
def test_a_library_is_imported_in_its_own_package_only(path: Path) -> None:
    text = "/".join(path.parts)
    for name in imported(ast.parse(path.read_text())):
        owner = ONLY_IN.get(name.split(".")[0])
        assert owner is None or f"/{owner}/" in text, f"{name} belongs to {owner}"
        if name.startswith("torch.distributed"):
            assert "/rft_dist/" in text, f"{name} belongs to rft_dist"
        if name.startswith("torch.utils.tensorboard"):
            assert "/rft_trainer/sinks/" in text


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: "/".join(p.parts[-3:]))
def test_code_holds_nothing_unsafe_or_unfinished(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not {n for n in imported(tree) if n.split(".")[0] in {"pickle", "dill", "joblib", "cloudpickle"}}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "torch.save", "yaml.load", "os.system"}, called
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                assert (keyword.arg, value) not in {("shell", "True"), ("trust_remote_code", "True")}
        if isinstance(node, ast.Raise) and node.exc is not None:
            assert "NotImplementedError" not in ast.unparse(node.exc)
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "a bare except hides failures"
    assert path.name not in {"utils.py", "helpers.py", "common.py", "misc.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: "/".join(p.parts[-3:]))
def test_a_file_holds_one_idea(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= 500, f"{lines} lines"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            body = (node.end_lineno or 0) - node.lineno - (ast.get_docstring(node) or "").count("\n")
            assert body <= 75, f"{node.name} has {body} lines without its docstring"


def test_settings_and_packages_import_no_torch() -> None:
    modules = [module_name(p) for p in PACKAGES]
    modules += [f"{m}.settings" for m in modules if importlib.util.find_spec(f"{m}.settings")]
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
    words = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "."]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.glob("worker-*"))) == 1
