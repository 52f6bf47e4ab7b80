"""People are spoken to by the command line alone: the library logs, raises, and hands over."""

from __future__ import annotations

import ast

import pytest
from architecture.source_tree import (
    PACKAGES,
    Sources,
    Violation,
    of_package,
    planted,
    real_sources,
    require_at_most,
)

MAY_PRINT = "rft_cli"


def printing_calls(sources: Sources) -> list[Violation]:
    """Calls that write to the terminal: `print`, and `write` of standard output or standard error."""
    found: list[Violation] = []
    for module in sources.values():
        if module.package == MAY_PRINT:
            continue
        for node in module.nodes:
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called.split(".")[0] in ("print", "pprint") or called.endswith(("stdout.write", "stderr.write")):
                    found.append(Violation(module.name, node.lineno, called))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_library_does_not_print(package: str) -> None:
    require_at_most(printing_calls(of_package(package, real_sources())), 0)


def test_planted_prints_are_found() -> None:
    sources = planted(
        rft__rl='print("begins")\nprinter.print("x")\nsys.stderr.write("x")\nfile.write("x")',
        rft_cli__main='print("begins")',
    )
    assert [violation.line for violation in printing_calls(sources)] == [1, 3]
