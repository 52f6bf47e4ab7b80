"""A file holds one idea, and a function fits on a screen."""

from __future__ import annotations

import ast

import pytest
from architecture.source_tree import (
    PACKAGES,
    FunctionNode,
    Sources,
    Violation,
    of_package,
    planted,
    real_sources,
    require_at_most,
)

MOST_FILE_LINES = 500
MOST_FUNCTION_LINES = 75
"""Without the docstring."""


def long_files(sources: Sources, most: int = MOST_FILE_LINES) -> list[Violation]:
    """Files with more lines than one idea takes."""
    counts = {module.name: module.text.count("\n") for module in sources.values()}
    return [Violation(name, 1, f"{lines} lines") for name, lines in counts.items() if lines > most]


def long_functions(sources: Sources, most: int = MOST_FUNCTION_LINES) -> list[Violation]:
    """Functions whose body, the docstring apart, is longer than a screen."""
    found: list[Violation] = []
    for module in sources.values():
        for node in module.nodes:
            if isinstance(node, FunctionNode):
                lines = (node.end_lineno or 0) - node.lineno - (ast.get_docstring(node) or "").count("\n")
                if lines > most:
                    found.append(Violation(module.name, node.lineno, f"{node.name} has {lines} lines"))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_holds_one_idea(package: str) -> None:
    sources = of_package(package, real_sources())
    require_at_most(long_files(sources), 0)
    require_at_most(long_functions(sources), 0)


def test_planted_lengths_are_found() -> None:
    text = 'def f():\n    """One.\n\n    Two.\n    """\n    x = 1\n    return x\n'
    sources = planted(a__one=text, a__two="")
    assert [violation.module for violation in long_files(sources, most=6)] == ["a.one"]
    assert [violation.what for violation in long_functions(sources, most=2)] == ["f has 4 lines"]
    assert long_files(sources, most=7) == long_functions(sources, most=4) == []
