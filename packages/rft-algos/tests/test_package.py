from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rft_algos

SOURCE = Path(rft_algos.__file__).parent
MODULES = sorted(
    str(path.relative_to(SOURCE).with_suffix("")).replace("/", ".")
    for path in SOURCE.rglob("*.py")
    if path.stem != "__init__"
)
TORCH_FREE = ("algorithms.published", "algorithms.components", "schedules.learning_rate", "statistics")
README = Path(__file__).parents[1] / "README.md"


def public_functions() -> list[Callable[..., object]]:
    modules = [importlib.import_module(f"rft_algos.{name}") for name in MODULES]
    return [
        function
        for module in modules
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    ]


@pytest.mark.parametrize("function", public_functions(), ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_every_public_function_says_what_it_does_and_its_shapes(function: Callable[..., object]):
    text = inspect.getdoc(function) or ""
    assert text.split("\n")[0].strip(), "the first line says what it does"
    takes_tensors = "Tensor" in str(inspect.signature(function))
    if takes_tensors:
        assert re.search(r"\[[A-Z, ]*[a-z_]*\]|broadcast", text), "a shape such as [T] or [B, V]"
    undocumented = [
        name
        for name in inspect.signature(function).parameters
        if "Args:" in text and not re.search(rf"^ +{name}:", text.partition("Args:")[2], re.MULTILINE)
    ]
    assert undocumented == []


@pytest.mark.parametrize("module", ["", *(f".{name}" for name in TORCH_FREE)])
def test_modules_that_settings_and_help_import_do_not_import_torch(module: str):
    code = f"import sys, rft_algos{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_the_standard_library_torch_and_rft_core_only(name: str):
    tree = ast.parse((SOURCE / f"{name.replace(chr(46), chr(47))}.py").read_text())
    roots = {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    roots |= {a.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "rft_algos", "rft_core"}


def test_the_readme_names_every_module_and_its_examples_run():
    text = README.read_text()
    assert [name for name in MODULES if f"`{name}`" not in text] == []
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, str(README), "exec"), {})
