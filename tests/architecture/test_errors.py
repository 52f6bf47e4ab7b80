"""An error code has one place: what it says and what to do about it is written once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from architecture.source_tree import FunctionNode, Module, Sources, planted, real_sources

CODE = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")
"""Area, dot, rule."""


def code_positions(sources: Sources) -> dict[tuple[str, str], int]:
    """(module, function) to the position of the argument `code`, for functions that hand it on to an error."""
    positions: dict[tuple[str, str], int] = {}
    for module in sources.values():
        for node in module.nodes:
            if isinstance(node, FunctionNode):
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                names = [name for name in names if name not in ("self", "cls")]
                if "code" in names:
                    positions[module.name, node.name] = names.index("code")
    return positions


def strings_in(expression: ast.expr) -> Iterator[str]:
    """The codes that an expression may have, of both sides of a condition."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str) and CODE.fullmatch(expression.value):
        yield expression.value
    elif isinstance(expression, ast.IfExp):
        yield from strings_in(expression.body)
        yield from strings_in(expression.orelse)


def codes_in(module: Module, positions: dict[tuple[str, str], int]) -> Iterator[str]:
    """The codes with which a module makes errors, itself or through a function that takes `code`."""
    public = {name: position for (_, name), position in positions.items() if not name.startswith("_")}
    for node in module.nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            position = positions.get((module.name, name), public.get(name))
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            given += [] if position is None else node.args[position : position + 1]
            for expression in given:
                yield from strings_in(expression)


def shared_codes(sources: Sources) -> dict[str, list[str]]:
    """The modules of every code that more than one module writes."""
    positions = code_positions(sources)
    places: dict[str, set[str]] = defaultdict(set)
    for module in sources.values():
        for code in codes_in(module, positions):
            places[code].add(module.name)
    return {code: sorted(names) for code, names in sorted(places.items()) if len(names) > 1}


def test_an_error_code_has_one_place() -> None:
    found = shared_codes(real_sources())
    assert not found, f"raise it through the module that has it, or give it a code of its own: {found}"


def test_a_planted_second_place_is_found() -> None:
    sources = planted(
        a__one="""
def refuse(where, code): raise OptionsError(code=code, where=where)
refuse("here", "run.exists")
DataError(code="data.empty" if x else "data.damaged", what="run.stopped")
open_with(code="utf8")
""",
        a__two="""
from a.one import refuse
def _refuse(code): ...
class A:
    def _problem(self, code): ...
refuse("there", "run.exists")
_refuse("run.other")
self._problem("data.damaged")
Problem(code=f"data.{x}", what="run.stopped")
Error(code="utf8")
""",
        a__three='_refuse("run.other")\nOptionsError(code="run.mine")',
    )
    assert shared_codes(sources) == {"data.damaged": ["a.one", "a.two"], "run.exists": ["a.one", "a.two"]}
