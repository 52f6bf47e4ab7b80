"""Shipped code runs nothing that came as data, hides no failure and leaves nothing unfinished."""

from __future__ import annotations

import ast

import pytest
from architecture.source_tree import (
    PACKAGES,
    Module,
    Sources,
    Violation,
    imported_names,
    of_package,
    planted,
    real_sources,
    require_at_most,
)

PICKLERS = {"pickle", "dill", "joblib", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "os.system"}
UNSAFE_ARGUMENTS = {("shell", "True"), ("trust_remote_code", "True")}
NAMES_WITHOUT_AN_IDEA = {"utils", "helpers", "common", "misc"}


def faults_of(node: ast.AST) -> list[str]:
    """What one node does that no shipped code may do."""
    faults: list[str] = []
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        faults += [called] if called in UNSAFE_CALLS else []
        given = [(keyword.arg or "", ast.unparse(keyword.value)) for keyword in node.keywords]
        faults += [f"{name}={value}" for name, value in given if (name, value) in UNSAFE_ARGUMENTS]
    elif isinstance(node, ast.Raise) and node.exc is not None:
        faults += ["raises NotImplementedError"] if "NotImplementedError" in ast.unparse(node.exc) else []
    elif isinstance(node, ast.ExceptHandler):
        faults += ["a bare except hides failures"] if node.type is None else []
    return faults


def unsafe_code(sources: Sources) -> list[Violation]:
    """Unsafe calls and imports, hidden failures, unfinished functions, and modules named after no idea."""
    found: list[Violation] = []
    for module in sources.values():
        found += [Violation(module.name, line, f"imports {base}") for line, base in pickler_imports(module)]
        for node in module.nodes:
            found += [Violation(module.name, getattr(node, "lineno", 1), what) for what in faults_of(node)]
        if module.stem in NAMES_WITHOUT_AN_IDEA:
            found.append(Violation(module.name, 1, f"{module.stem} names no idea"))
    return found


def pickler_imports(module: Module) -> list[tuple[int, str]]:
    """Imports of libraries that run code when they read data."""
    return [(line, base) for line, base, _ in imported_names(module) if base.split(".")[0] in PICKLERS]


@pytest.mark.parametrize("package", PACKAGES)
def test_code_holds_nothing_unsafe_or_unfinished(package: str) -> None:
    require_at_most(unsafe_code(of_package(package, real_sources())), 0)


def test_planted_faults_are_found() -> None:
    sources = planted(
        a__utils="""
import pickle
def f():
    from cloudpickle.fast import dumps
    raise NotImplementedError("later")
try:
    torch.load(path); model.eval()
    run("ls", shell=True)
except:
    pass
"""
    )
    assert sorted(violation.line for violation in unsafe_code(sources)) == [1, 2, 4, 5, 7, 8, 9]
