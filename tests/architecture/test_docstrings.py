"""A docstring's first line is a sentence: a subject or an imperative, four words or more, a full stop."""

from __future__ import annotations

import ast

import pytest
from architecture.source_tree import (
    PACKAGES,
    FunctionNode,
    Sources,
    Violation,
    docstring_owners,
    of_package,
    planted,
    real_sources,
    require_at_most,
)

FEWEST_WORDS = 4
BARE_BEGINNINGS = {
    *("What", "How", "Which", "Whether", "Where"),
    *("Of", "As", "In", "To", "By", "With", "Without"),
    "See",
}
"""Words after which the reader still looks for what is spoken of; `As of`, `Of the` and `In blocks` are among them."""

CEILINGS: dict[str, int] = {
    "rft": 2,
    "rft_algos": 0,
    "rft_cli": 0,
    "rft_core": 0,
    "rft_dist": 0,
    "rft_engine": 6,
    "rft_genrec": 0,
    "rft_models": 0,
    "rft_trainer": 0,
    "rft_kernels": 0,
}
"""Docstrings of each package that break the rule; the number may only fall (`python count_violations.py`)."""


def fault_of(docstring: str) -> str | None:
    """What is wrong with the first line, if anything is."""
    first = docstring.strip().splitlines()[0] if docstring.strip() else ""
    words = first.split()
    if len(words) < FEWEST_WORDS:
        return "fewer than four words"
    if words[0].rstrip(",:") in BARE_BEGINNINGS:
        return f"begins with {words[0]}"
    return None if first.endswith(".") else "no full stop at the end of the first line"


def poor_docstrings(sources: Sources) -> list[Violation]:
    """Docstrings of modules, classes and public functions whose first line is no sentence."""
    found: list[Violation] = []
    for module in sources.values():
        for owner in docstring_owners(module.tree):
            if isinstance(owner, FunctionNode) and owner.name.startswith("_"):
                continue
            text = ast.get_docstring(owner)
            fault = fault_of(text) if text is not None else None
            if text is not None and fault is not None:
                line = 1 if isinstance(owner, ast.Module) else owner.lineno
                found.append(Violation(module.name, line, f"{fault}: {text.splitlines()[0] if text else ''}"))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_first_lines_are_sentences(package: str) -> None:
    require_at_most(poor_docstrings(of_package(package, real_sources())), CEILINGS[package])


def test_planted_docstrings_are_found() -> None:
    sources = planted(
        a__one='''
"""What every engine tells of itself."""
class A:
    """As of the reward model."""
    def f(self):
        """Return the number of rows."""
        def inside():
            """Never."""
    def _g(self):
        """Never."""
if True:
    def h():
        """Returns the length
        of the longest row."""
    async def i():
        """In blocks."""
''',
        a__two='"""Inside a room, as always."""\ndef f(): ...',
    )
    assert [(v.module, v.line) for v in poor_docstrings(sources)] == [
        ("a.one", 1),
        ("a.one", 3),
        ("a.one", 12),
        ("a.one", 15),
    ]
