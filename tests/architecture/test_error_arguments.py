"""L2: what a function takes for the fields of an error is written as those fields are, where it is called."""

from __future__ import annotations

import ast
import functools
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from architecture.source_tree import FunctionNode, Module, Sources, Violation, imported_names, planted, real_sources
from architecture.test_error_fields import (
    FIELDS,
    LISTS,
    LONGEST,
    LONGEST_REMEDY,
    literal_parts,
    with_docstring,
    without_remedy,
)

Key = tuple[str, str]
"""Module and function."""
ERRORS = re.compile(r"(Error|Problem|Signal)$")
AT_ONCE = "rule and remedy at once"
"""What the docstring of an error class says whose `what` holds both: it may be without `why` and `do`."""
RECORDS = ("SettingsRefusal",)
"""Classes that keep `why` and `do` for an error that is made later."""


class Maker(NamedTuple):
    """A function that makes an error of its arguments."""

    name: str
    parameters: tuple[str, ...]
    """Those that may be given by their place; `self` and `cls` are left out."""
    defaults: Mapping[str, ast.expr]
    fields: Mapping[str, frozenset[str]]
    """A parameter to the fields that it becomes; those that may be empty are left out."""


def is_empty(expression: ast.expr, constants: Mapping[str, ast.expr]) -> bool:
    """Whether a field can be an empty text: itself, on one side of a condition, or by the name of a constant."""
    if isinstance(expression, ast.Constant):
        return isinstance(expression.value, str) and not expression.value.strip()
    if isinstance(expression, ast.IfExp):
        return is_empty(expression.body, constants) or is_empty(expression.orelse, constants)
    if isinstance(expression, ast.BoolOp) and isinstance(expression.op, ast.Or):
        return is_empty(expression.values[-1], constants)
    return isinstance(expression, ast.Name) and expression.id in constants and is_empty(constants[expression.id], {})


def constants_of(module: Module) -> dict[str, ast.expr]:
    """The values of the names that a module binds at its top."""
    return {
        target.id: node.value
        for node in module.tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def names_of(expression: ast.expr) -> Iterator[str]:
    """The names any of which may be the whole of a field."""
    if isinstance(expression, ast.Name):
        yield expression.id
    elif isinstance(expression, ast.IfExp):
        yield from names_of(expression.body)
        yield from names_of(expression.orelse)


class Written(NamedTuple):
    """A call, as it is written."""

    name: str
    """The last part of what is called."""
    node: ast.Call
    keywords: Mapping[str, ast.expr]
    is_whole: bool
    """Whether all arguments stand in the call, none in a mapping or a sequence."""


def written_calls(module: Module) -> list[Written]:
    """The calls of a module that have a name, in the order of their lines."""
    found: list[Written] = []
    for node in module.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            starred = any(isinstance(argument, ast.Starred) for argument in node.args)
            found.append(Written(name, node, keywords, len(keywords) == len(node.keywords) and not starred))
    return sorted(found, key=_line)


def _line(call: Written) -> int:
    return call.node.lineno


class Makers:
    """The functions of all modules that make errors of their arguments, those that call such a function too."""

    def __init__(self, sources: Sources) -> None:
        self.free = {name: {"do"} for name in without_remedy(sources)}
        self.free |= {name: {"why", "do"} for name in with_docstring(sources, AT_ONCE)}
        self.functions: dict[Key, list[FunctionNode]] = defaultdict(list)
        for module in sources.values():
            for node in module.nodes:
                if isinstance(node, FunctionNode) and not node.name.startswith("__"):
                    self.functions[module.name, node.name].append(node)
        self.count = Counter(name for _, name in self.functions for _ in self.functions[_, name])
        self.imported = {
            module.name: {name: home for _, home, name in imported_names(module) if name} for module in sources.values()
        }
        self.known: dict[Key, Maker] = {}
        self.by_name: dict[str, set[Key]] = defaultdict(set)
        # of two functions of one name, methods of two classes, nobody knows which is called
        self.alone = {key: nodes[0] for key, nodes in self.functions.items() if len(nodes) == 1}
        self.written = {name: written_calls(module) for name, module in sources.items()}
        self.calls = {key: self._within(key[0], node) for key, node in self.alone.items()}
        while self._grow():
            pass

    def _within(self, module: str, function: FunctionNode) -> list[Written]:
        """The calls that stand in the lines of a function."""
        written = self.written[module]
        first = bisect_left(written, function.lineno, key=_line)
        return written[first : bisect_right(written, function.end_lineno or function.lineno, key=_line)]

    def _grow(self) -> bool:
        """Add the functions whose arguments become fields by a call of them; whether there was anything to add."""
        before = {key: maker.fields for key, maker in self.known.items()}
        for key, written in self.calls.items():
            fields: dict[str, set[str]] = defaultdict(set)
            for call in written:
                for field, value in self.given(key[0], call):
                    for parameter in names_of(value):
                        fields[parameter].add(field)
            if fields:
                self._add(key, self.alone[key], fields)
        return before != {key: maker.fields for key, maker in self.known.items()}

    def _add(self, key: Key, node: FunctionNode, fields: Mapping[str, set[str]]) -> None:
        places = [*node.args.posonlyargs, *node.args.args]
        parameters = tuple(each.arg for each in places if each.arg not in ("self", "cls"))
        defaults = dict(zip([each.arg for each in places][::-1], node.args.defaults[::-1], strict=False))
        for each, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if value is not None:
                defaults[each.arg] = value
        own = {*parameters, *(each.arg for each in node.args.kwonlyargs)}
        kept = {parameter: frozenset(names) for parameter, names in fields.items() if parameter in own}
        if kept:
            self.known[key] = Maker(key[1], parameters, defaults, kept)
            self.by_name[key[1]].add(key)

    def called(self, module: str, call: Written) -> Maker | None:
        """The maker that a call calls, where this is certain."""
        if call.name not in self.by_name:
            return None
        if (module, call.name) in self.functions:
            return self.known.get((module, call.name))
        home = self.imported[module].get(call.name)
        if isinstance(call.node.func, ast.Name):
            found = [self.known.get((f"{home}{end}", call.name)) for end in ("", ".__init__")]
            return next((maker for maker in found if maker is not None), None)
        # a method, or a function of an imported module: the only one of a public name
        is_only = self.count[call.name] == 1 and not call.name.startswith("_")
        return self.known[next(iter(self.by_name[call.name]))] if is_only else None

    def given(self, module: str, call: Written) -> Iterator[tuple[str, ast.expr]]:
        """The fields of the error that a call makes or has made, with what is given for them."""
        if call.name in RECORDS or (ERRORS.search(call.name) and "code" in call.keywords):
            needed = [field for field in FIELDS if field not in self.free.get(call.name, ())]
            yield from ((field, call.keywords[field]) for field in needed if field in call.keywords)
        elif maker := self.called(module, call):
            bound = dict(zip(maker.parameters, call.node.args, strict=False)) if call.is_whole else {}
            for parameter, fields in maker.fields.items():
                value = call.keywords.get(parameter) or bound.get(parameter)
                if value is None and call.is_whole:
                    value = maker.defaults.get(parameter)
                if value is not None:
                    yield from ((field, value) for field in sorted(fields))


def last_values(function: FunctionNode) -> dict[str, ast.expr]:
    """What a function gives its names, the last value of each."""
    values: dict[str, tuple[int, ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name not in values or values[name][0] < node.lineno:
                values[name] = node.lineno, node.value
    return {name: value for name, (_, value) in values.items()}


@functools.cache
def real_makers() -> Makers:
    """The makers of every module that the workspace ships."""
    return Makers(real_sources())


def violations(sources: Sources, makers: Makers) -> list[Violation]:
    """Calls that give an empty text, one that is too long or a list of things to try for a field of an error."""
    found: set[Violation] = set()
    for module in sources.values():
        constants = constants_of(module)
        for call in makers.written[module.name]:
            where = module.name, call.node.lineno
            for field, value in makers.given(module.name, call):
                if is_empty(value, constants):
                    found.add(Violation(*where, f"{call.name}: {field} can be empty"))
                # the literals of an error itself are held to this by `test_error_fields`
                parts = [] if ERRORS.search(call.name) else literal_parts(value)
                if sum(map(len, parts)) > (LONGEST_REMEDY if field == "do" else LONGEST):
                    found.add(Violation(*where, f"{call.name}: {field} is too long"))
                if LISTS.search(" ".join(parts)):
                    found.add(Violation(*where, f"{call.name}: {field} is a list of things to try"))
        found.update(mappings(module, constants))
    found.update(from_names(makers))
    return sorted(found)


def from_names(makers: Makers) -> Iterator[Violation]:
    """Fields that a function gives by a name whose last value can be an empty text."""
    for key, calls in makers.calls.items():
        named = [(call, field, set(names_of(value))) for call in calls for field, value in makers.given(key[0], call)]
        if not any(names for _, _, names in named):
            continue
        empty = {name for name, value in last_values(makers.alone[key]).items() if is_empty(value, {})}
        for call, field, names in named:
            if names & empty:
                yield Violation(key[0], call.node.lineno, f"{call.name}: {field} can be empty")


def mappings(module: Module, constants: Mapping[str, ast.expr]) -> Iterator[Violation]:
    """Fields of an error that are written as a mapping, and lack one."""
    for node in module.nodes:
        if isinstance(node, ast.Dict):
            given = {
                key.value: value
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
            }
            if {"code", "why"} <= given.keys():
                for field in FIELDS:
                    if field not in given or is_empty(given[field], constants):
                        yield Violation(module.name, node.lineno, f"mapping without {field}")


def test_no_argument_leaves_a_field_of_an_error_empty() -> None:
    assert list(map(str, violations(real_sources(), real_makers()))) == []


def test_functions_make_errors_of_their_arguments() -> None:
    # where none was found, the test above would hold for nothing
    known = real_makers().known
    assert known["rft_trainer.data.readers.rows", "wrong_type"].fields["why"] == {"why"}
    assert len(known) > 150


def test_an_argument_that_is_empty_too_long_or_a_list_is_found() -> None:
    sources = planted(
        a__one=f'''
NOTHING = ""
def refuse(what, why="", *, remedy): raise OptionsError(code="a.b", what=what, where="w", why=why, do=remedy)
def through(remedy): refuse("w", "y", remedy=remedy)
class A:
    def _refused(self, why): return Problem(code="a.c", what="w", where="w", why=why, do="d")
    def f(self): self._refused("  ")
refuse("w", "y", remedy="d")
refuse("w", remedy="d")
refuse("w", "y", remedy="d" if x else "")
refuse("w", "y", remedy=x or NOTHING)
through("")
refuse("w", "{"y" * 401}", remedy="please mend it")
refuse(*texts, **rest)
''',
        a__two="""
from a.one import through
def g():
    do = ""
    through(do)
    do = "d"
def h():
    do = "d"
    do = f"{x}" if x else ""
    through(remedy=do)
def other(remedy): ...
other("")
fields = {"code": "a.d", "what": "w", "where": "w", "why": "", "do": "d"}
SettingsRefusal(code="a.e", names=(), why="y", do="")
""",
    )
    assert [(each.module, each.line, each.what) for each in violations(sources, Makers(sources))] == [
        ("a.one", 7, "_refused: why can be empty"),
        ("a.one", 9, "refuse: why can be empty"),
        ("a.one", 10, "refuse: do can be empty"),
        ("a.one", 11, "refuse: do can be empty"),
        ("a.one", 12, "through: do can be empty"),
        ("a.one", 13, "refuse: do is a list of things to try"),
        ("a.one", 13, "refuse: why is too long"),
        ("a.two", 10, "through: do can be empty"),
        ("a.two", 13, "mapping without why"),
        ("a.two", 14, "SettingsRefusal: do can be empty"),
    ]
