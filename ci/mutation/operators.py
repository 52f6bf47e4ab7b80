"""The fixed list of small faults, and every place of a source text where one fits. Pure: text in, mutants out.

    sign                -x -> x, + <-> -
    product             * <-> /
    denominator         a / b -> a / (b + 1), likewise //; a literal b is changed as a constant
    constant            x -> 1.1 x, 0.0 -> 0.1; integers + 1
    default             the same for default values of arguments and fields
    comparison          < <-> <=, > <-> >=, == <-> !=
    connective          and <-> or
    condition           c -> not c, in `if`, `while`, `a if c else b` and comprehensions
    extremum            min <-> max, amin <-> amax, minimum <-> maximum and their like
    mask                where(m, a, b) -> a, x.masked_fill(m, v) -> x
    left, right         a & b -> a or b alone, a | b likewise; a &= b and a |= b are left out
    detach              x.detach() -> x, except where it is compared: a comparison has no gradient
    clamp               x.clamp(...) -> x
    bound               clamp(min=b) -> clamp(min=b + 1), where b holds no literal

and, outside of the equations ("wider"), where order and effects count as much as numbers:

    boolean             True <-> False
    statement           a call whose value nobody takes, such as os.fsync(handle) -> pass
    branch              if c: -> if False:, where there is no else
    keyword             f(a, name=b) -> f(a), in calls with no other change of a keyword
    order               f(a, b) -> f(b, a), where the first two arguments are names or attributes

What is written to logs or printed, and what an error says, is left alone, functions that only make an error included;
so are methods of protocols, the places where tests plant faults, and the value of a limit of time
(`_STORE_SECONDS = 1.0`), but not that it is handed on. Annotations, docstrings, f-strings, messages of assertions, what
is raised, and unions of types are left alone everywhere.
"""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass

COMPARISONS = {"Lt": ("<", "<="), "LtE": ("<=", "<"), "Gt": (">", ">="), "GtE": (">=", ">")}
COMPARISONS |= {"Eq": ("==", "!="), "NotEq": ("!=", "==")}
BINARY = {"Add": ("sign", "+", "-"), "Sub": ("sign", "-", "+")}
BINARY |= {"Mult": ("product", "*", "/"), "Div": ("product", "/", "*")}
PAIRS = (("min", "max"), ("amin", "amax"), ("minimum", "maximum"), ("argmin", "argmax"), ("cummin", "cummax"))
EXTREMA = dict(PAIRS) | {right: left for left, right in PAIRS}
CLAMPS = ("clamp", "clamp_", "clamp_min", "clamp_max")
COMMENT = re.compile(rb"#[^\n]*")
SILENT = ("print", "debug", "info", "warning", "error", "exception", "declare", "fault_point", "__init__")
"""Calls that a removal would not change for a program: what they say is for people, they are places where tests plant
faults, or are needed to begin at all."""
DEFENCES = {"strict", "exist_ok", "missing_ok", "parents", "daemon", "non_blocking"}
"""Keywords that refuse or allow what does not come about."""
SAME_HERE = {"covariant", "contravariant", "encoding"}
"""Keywords without an effect on a program: for type checkers alone, or the encoding that files have here anyway."""
OF_ERRORS = {"code", "what", "why", "where"}
"""Keywords of what an error says."""
FOR_PEOPLE = ("nearest_names", "sleep")
"""Calls whose arguments choose what a message proposes, or how often something is looked at."""
PATIENCE = re.compile(r"(^|_)(seconds|timeout|patience|wait)$", re.IGNORECASE)
"""Names of limits of time: a tenth more of one is no fault, where it is not obeyed is."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small fault: bytes `start` to `end` of the module's source become `replacement`."""

    module: str
    """Below rft_algos, with dots."""
    line: int
    column: int
    """Of the token that changes, counted from 0."""
    operator: str
    digest: str
    """Of the line's text, so that an id never comes to name another fault."""
    start: int
    end: int
    replacement: str

    @property
    def id(self) -> str:
        """Names the fault as long as nothing above it and nothing on its line changes."""
        return f"{self.module}:{self.line}:{self.column}:{self.operator}:{self.digest}"

    @property
    def unplaced(self) -> tuple[str, int, str, str]:
        """The id without its line number, which changes whenever something above does."""
        return self.module, self.column, self.operator, self.digest

    def applied(self, source: bytes) -> bytes:
        """The source with the fault."""
        return source[: self.start] + self.replacement.encode() + source[self.end :]

    def lines(self, source: bytes) -> tuple[str, str]:
        """The line as it is and as the fault makes it; several lines are joined."""
        first = source.rfind(b"\n", 0, self.start) + 1
        last = source.find(b"\n", self.end)
        last = len(source) if last < 0 else last
        change = (source[self.start : self.end], self.replacement.encode())
        texts = (source[first : self.start] + middle + source[self.end : last] for middle in change)
        before, after = (" ".join(text.decode().split()) for text in texts)
        return before, after


def mutants(module: str, source: bytes, *, wider: bool = False) -> list[Mutant]:
    """Every fault of the list that fits the source, in order of place.

    Args:
        module: its name, for the ids.
        source: Python.
        wider: with the faults that are made outside of the equations.

    Returns:
        Mutants, each with an id of its own.
    """
    finder = _WiderFinder(source) if wider else _Finder(source)
    finder.visit(ast.parse(source))
    lines = source.split(b"\n")
    found: list[Mutant] = []
    for operator, token, start, end, replacement in sorted(set(finder.found), key=lambda place: (place[1], place[0])):
        line = source.count(b"\n", 0, token)
        digest = hashlib.sha256(lines[line].strip()).hexdigest()[:6]
        column = token - (source.rfind(b"\n", 0, token) + 1)
        found.append(Mutant(module, line + 1, column, operator, digest, start, end, replacement))
    assert len({mutant.id for mutant in found}) == len(found), f"two mutants of {module} share an id"
    return found


class _Finder(ast.NodeVisitor):
    """Collects (operator, byte of the token, first byte, end, replacement)."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.line_starts = [0, *(match.end() for match in re.finditer(rb"\n", source))]
        self.found: list[tuple[str, int, int, int, str]] = []
        self.operator_of_constants = "constant"
        self.depth = 0

    # places in the text

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """First byte of a node and the byte after its last."""
        assert node.end_lineno is not None, "a parsed node has an end"
        assert node.end_col_offset is not None, "a parsed node has an end"
        start = self.line_starts[node.lineno - 1] + node.col_offset
        return start, self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def token(self, left: ast.expr, right: ast.expr, word: str) -> tuple[int, int]:
        """Where an operator stands between its operands; brackets and comments may stand there too."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = COMMENT.sub(lambda match: b" " * len(match.group()), self.source[start:end])
        at = start + gap.index(word.encode())
        return at, at + len(word)

    def add(self, operator: str, token: int, span: tuple[int, int], replacement: str) -> None:
        self.found.append((operator, token, *span, replacement))

    def swap(self, operator: str, left: ast.expr, right: ast.expr, words: tuple[str, str]) -> None:
        span = self.token(left, right, words[0])
        self.add(operator, span[0], span, words[1])

    def replace(self, operator: str, token: int, node: ast.expr, kept: ast.expr) -> None:
        """The whole of a node becomes one of its parts."""
        self.add(operator, token, self.span(node), f"({self.text(kept)})")

    def one_more(self, operator: str, node: ast.expr) -> None:
        simple = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        text = self.text(node) if simple else f"({self.text(node)})"
        self.add(operator, self.span(node)[0], self.span(node), f"({text} + 1)")

    # what is left alone

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.inside(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.operator_of_constants = "default"
        for value in (*node.args.defaults, *node.args.kw_defaults):
            if value is not None:
                self.visit(value)
        self.operator_of_constants = "constant"
        self.inside(node.body)

    def inside(self, body: list[ast.stmt]) -> None:
        self.depth += 1
        for statement in body:
            self.visit(statement)
        self.depth -= 1

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.operator_of_constants = "default"
            self.visit(node.value)
            self.operator_of_constants = "constant"

    # what is changed

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if isinstance(value, int):
            changed = str(value + 1)
        else:
            changed = repr(float(f"{value * 1.1:.12g}")) if value else "0.1"
        self.add(self.operator_of_constants, self.span(node)[0], self.span(node), changed)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub):
            start = self.span(node)[0]
            self.add("sign", start, (start, start + 1), "")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        name = type(node.op).__name__
        if name in BINARY and not (_is_text(node.left) or _is_text(node.right)):
            operator, word, other = BINARY[name]
            self.swap(operator, node.left, node.right, (word, other))
        if name in ("Div", "FloorDiv") and not _is_number(node.right):
            self.one_more("denominator", node.right)
        if name in ("BitAnd", "BitOr"):
            if self.depth == 0:
                return  # a name for a union of types
            token = self.token(node.left, node.right, "&" if name == "BitAnd" else "|")[0]
            self.replace("left", token, node, node.left)
            self.replace("right", token, node, node.right)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id == "Literal"):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        name = type(node.op).__name__
        if name in BINARY:
            operator, word, other = BINARY[name]
            self.swap(operator, node.target, node.value, (f"{word}=", f"{other}="))
        if name in ("BitAnd", "BitOr"):
            self.add("left", self.span(node)[0], self.span(node), "pass")
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, comparison, right in zip(operands, node.ops, operands[1:], strict=False):
            words = COMPARISONS.get(type(comparison).__name__)
            if words is not None:
                self.swap("comparison", left, right, words)
        for operand in operands:
            self.visit(operand.func.value if _is_detach(operand) else operand)  # type: ignore[attr-defined]

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.swap("connective", left, right, words)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        self.add("condition", self.span(test)[0], self.span(test), f"(not ({self.text(test)}))")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in EXTREMA:
            end = self.span(node)[1]
            start = end - len(node.attr)
            self.add("extremum", start, (start, end), EXTREMA[node.attr])
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name):
            if node.func.id in EXTREMA:
                self.add("extremum", *(span := self.span(node.func))[:1], span, EXTREMA[node.func.id])
            arguments = node.args[1:] if node.func.id == "cast" else node.args
            for part in (*arguments, *node.keywords):
                self.visit(part)
            return
        if isinstance(node.func, ast.Attribute):
            self.method(node, node.func)
        self.generic_visit(node)

    def method(self, node: ast.Call, function: ast.Attribute) -> None:
        """What is dropped: a mask, a detach, a clamp; and bounds of clamps that hold no literal."""
        name, token = function.attr, self.span(function)[1] - len(function.attr)
        of_torch = isinstance(function.value, ast.Name) and function.value.id == "torch"
        if name == "where" and of_torch:
            self.replace("mask", token, node, node.args[1])
        elif name in ("where", "masked_fill", "masked_fill_"):
            self.replace("mask", token, node, function.value)
        elif _is_detach(node):
            self.replace("detach", token, node, function.value)
        elif name in CLAMPS:
            self.replace("clamp", token, node, node.args[0] if of_torch else function.value)
            for bound in (*node.args[of_torch:], *(keyword.value for keyword in node.keywords)):
                if not any(isinstance(part, ast.Constant) for part in ast.walk(bound)):
                    self.one_more("bound", bound)


class _WiderFinder(_Finder):
    """Besides, the faults of programs that do things: what is left out, taken in another order, or not asked."""

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("boolean", self.span(node)[0], self.span(node), str(not node.value))
        super().visit_Constant(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in DEFENCES | SAME_HERE and not (_is_patience(node.arg) and _is_number(node.value)):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if (isinstance(node.returns, ast.Name) and node.returns.id.endswith("Error")) or _is_declared(node):
            return
        pairs: list[tuple[ast.arg, ast.expr | None]] = []
        pairs += zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
        pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        self.operator_of_constants = "default"
        for argument, value in pairs:
            if value is not None and not (_is_patience(argument.arg) and _is_number(value)):
                self.visit(value)
        self.operator_of_constants = "constant"
        self.inside(node.body)

    def visit_Assign(self, node: ast.Assign) -> None:
        [target, *_] = node.targets
        if not (isinstance(target, ast.Name) and _is_patience(target.id) and _is_number(node.value)):
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if not (isinstance(node.target, ast.Name) and _is_patience(node.target.id) and _is_number(node.value)):
            super().visit_AnnAssign(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if _name_of(node.value.func) in SILENT:
                return
            self.add("statement", self.span(node)[0], self.span(node), "pass")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if not node.orelse and ast.unparse(node.test) not in ("TYPE_CHECKING", "False"):
            self.add("branch", self.span(node.test)[0], self.span(node.test), "False")
        super().visit_If(node)

    def visit_Call(self, node: ast.Call) -> None:
        if OF_ERRORS & {keyword.arg for keyword in node.keywords} or _name_of(node.func).endswith("Error"):
            return
        if _name_of(node.func) in FOR_PEOPLE:
            return
        self.keywords(node)
        if len(node.args) >= 2 and all(isinstance(part, ast.Name | ast.Attribute) for part in node.args[:2]):
            first, second = (self.span(part) for part in node.args[:2])
            between = self.source[first[1] : second[0]].decode()
            swapped = f"{self.text(node.args[1])}{between}{self.text(node.args[0])}"
            if self.text(node.args[0]) != self.text(node.args[1]) and _name_of(node.func) != "isinstance":
                self.add("order", first[0], (first[0], second[1]), swapped)
        super().visit_Call(node)

    def keywords(self, node: ast.Call) -> None:
        """A keyword and the comma before it go; of a call with keywords alone the first one stays."""
        dropped = node.keywords if node.args else node.keywords[1:]
        for before, keyword in zip([*node.args[-1:], *node.keywords], dropped, strict=False):
            kept = {None, *DEFENCES, *(["name"] if _name_of(node.func) == "Thread" else [])}
            if keyword.arg not in kept and self.span(before)[1] < self.span(keyword)[0]:
                start, end = self.span(before)[1], self.span(keyword)[1]
                self.add("keyword", self.span(keyword)[0], (start, end), "")


def _name_of(function: ast.expr) -> str:
    """The last part of a dotted name; empty for what has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_declared(node: ast.FunctionDef) -> bool:
    """Whether a function has no body: a method of a protocol, whose defaults belong to those that fulfil it."""
    last = node.body[-1]
    return isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant) and last.value.value is ...


def _is_patience(name: str | None) -> bool:
    return name is not None and PATIENCE.search(name) is not None


def _is_number(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_detach(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach"
