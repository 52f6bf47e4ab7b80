"""L2: every error that a package raises has its fields, one remedy, and lines that can be read; and L4: what the
documentation quotes of errors is what the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from architecture.source_tree import ROOT, Module, Sources, Violation, planted, real_sources

FIELDS = ("code", "what", "where", "why", "do")
LONGEST = 400
"""Characters of the literal parts of one field; what is filled in comes on top."""
LONGEST_REMEDY = 300
NO_REMEDY = "has no remedy"
"""What the docstring of an error class says whose errors cannot be mended by whoever meets them."""
LISTS = re.compile(r"\btry (one of|the following)|one or more of|\bor try\b|make sure that|please", re.IGNORECASE)
"""Words of a list of things to try."""
CODE = re.compile(r"[a-z0-9_]+(?:\.[a-z0-9_]+)+")


def error_calls(module: Module) -> Iterator[tuple[ast.Call, dict[str, ast.expr]]]:
    """The calls that make an error or a problem of its fields, and these."""
    for node in module.nodes:
        if isinstance(node, ast.Call) and re.search(r"(Error|Problem|Signal)$", ast.unparse(node.func)):
            given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            # fields that come as a mapping were written where that was made
            if "code" in given and all(keyword.arg for keyword in node.keywords):
                yield node, given


def literal_parts(expression: ast.expr) -> list[str]:
    """The texts that stand in an expression, in order; of both sides of a condition and of a sum."""
    if isinstance(expression, ast.Constant):
        return [expression.value] if isinstance(expression.value, str) else []
    if isinstance(expression, ast.JoinedStr):
        return [part.value for part in expression.values if isinstance(part, ast.Constant)]
    if isinstance(expression, ast.IfExp):
        return [*literal_parts(expression.body), *literal_parts(expression.orelse)]
    if isinstance(expression, ast.BinOp):
        return [*literal_parts(expression.left), *literal_parts(expression.right)]
    return []


def is_empty(expression: ast.expr) -> bool:
    """Whether a field is an empty text."""
    return isinstance(expression, ast.Constant) and isinstance(expression.value, str) and not expression.value.strip()


def without_remedy(sources: Sources) -> set[str]:
    """Names of error classes that say that they have no remedy."""
    return with_docstring(sources, NO_REMEDY)


def with_docstring(sources: Sources, words: str) -> set[str]:
    """Names of classes whose docstring holds these words."""
    classes = (node for module in sources.values() for node in module.nodes if isinstance(node, ast.ClassDef))
    return {node.name for node in classes if words in (ast.get_docstring(node) or "")}


def violations(sources: Sources) -> list[Violation]:
    """Errors that lack a field, have one without a word or one that is too long."""
    found: list[Violation] = []
    free = without_remedy(sources)
    for module in sources.values():
        for call, given in error_calls(module):
            name = ast.unparse(call.func).split(".")[-1]
            needed = [field for field in FIELDS if field != "do" or name not in free]
            for field in needed:
                if field not in given or is_empty(given[field]):
                    found.append(Violation(module.name, call.lineno, f"{name} without {field}"))
            for field in set(FIELDS) & given.keys():
                parts = literal_parts(given[field])
                most = LONGEST_REMEDY if field == "do" else LONGEST
                if sum(map(len, parts)) > most:
                    found.append(Violation(module.name, call.lineno, f"{name}: {field} is too long"))
                if LISTS.search(" ".join(parts)):
                    found.append(Violation(module.name, call.lineno, f"{name}: {field} is a list of things to try"))
    return found


def test_every_error_has_its_fields_and_one_remedy() -> None:
    assert list(map(str, violations(real_sources()))) == []


def test_a_field_that_is_missing_empty_or_too_long_is_found() -> None:
    sources = planted(
        a__one=f'''
class Lost(RftError):
    """What {NO_REMEDY}."""
OptionsError(code="a.b", what="w", where="h", why="y", do="d")
OptionsError(code="a.b", what="w", where="h", why="y")
OptionsError(code="a.b", what="w", where="h", why="", do=" ")
OptionsError(code="a.b", what=f"{{x}}" + "w" * 1, where="h", why="{"y" * 401}", do="d")
OptionsError(code="a.b", what="w", where="h", why="y", do="please mend it")
Problem(code="a.b", **rest)
LostError(code="a.b", what="w", where="h", why="y")
kind.of(code="a.b")
'''.replace("class Lost(", "class LostError(")
    )
    assert [(each.line, each.what) for each in violations(sources)] == [
        (5, "OptionsError without do"),
        (6, "OptionsError without why"),
        (6, "OptionsError without do"),
        (7, "OptionsError: why is too long"),
        (8, "OptionsError: do is a list of things to try"),
    ]


# --- what the documentation quotes ---

PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("packages/*/README.md")})
QUOTED = re.compile(r"^(?:error|warning)  (\S.*)$|^  (?:why)  +(\S.*)$")
"""A line of an error as people see it, in a block."""
FEWEST = 12
"""Letters of the literal parts by which a message is told."""


def quoted(text: str) -> list[str]:
    """Causes and reasons in the blocks of a page that show an error."""
    lines: list[str] = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
        shown = [match for line in block.splitlines() if (match := QUOTED.match(line))]
        if any(match[1] for match in shown):
            lines += [match[1] or match[2] for match in shown]
    return lines


def messages(sources: Sources) -> list[list[str]]:
    """The literal parts of every text in the code."""
    found: list[list[str]] = []
    for module in sources.values():
        for node in module.nodes:
            if isinstance(node, ast.JoinedStr | ast.Constant):
                parts = [part for part in literal_parts(node) if part.strip()]
                if sum(len(part) for part in parts) >= FEWEST:
                    found.append(parts)
    return found


def covers(parts: list[str], line: str) -> bool:
    """Whether all parts of a message stand in a quoted line in their order; "..." in it stands for what is left out."""
    position = held = 0
    for part in (part.strip() for part in parts):
        at = line.find(part, position)
        if at >= 0:
            position, held = at + len(part), held + len(part)
        elif "..." not in line:
            return False
    return held >= FEWEST and ("..." in line or held >= 0.25 * len(line))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_quoted_error_is_one_of_the_code(page: Path) -> None:
    lines = quoted(page.read_text())
    known = messages(real_sources()) if lines else []
    unknown = [line for line in lines if not any(covers(parts, line) for parts in known)]
    assert unknown == [], "no code says this"


def test_a_quoted_error_that_no_code_says_is_found() -> None:
    shown = "error  3 rows of a.jsonl are empty\n  where   a.jsonl\n  why     a row without words teaches nothing\n"
    page = f"```text\n{shown}```\n"
    assert quoted(page) == ["3 rows of a.jsonl are empty", "a row without words teaches nothing"]
    assert quoted("```sh\n  why     not\n```\n") == []
    known = messages(planted(a__one='x = f"{n} rows of {file} are empty"; y = "a row of few words teaches little"'))
    assert [any(covers(parts, line) for parts in known) for line in quoted(page)] == [True, False]
    assert any(
        covers(parts, "a row of few words ...") for parts in messages(planted(a__one='y = f"a row of few words {x}"'))
    )
