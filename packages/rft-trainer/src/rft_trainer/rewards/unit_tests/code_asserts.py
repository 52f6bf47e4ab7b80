"""Asserts of a data set as calls with expected results, parsed and never run."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_trainer.sandbox.values import Closeness

_SHOWN = 120
_FORMS = "assert f(1, [2]) == 3, assert f(1), assert not f(1), or assert abs(f(1) - 0.5) < 1e-6, with literals"


class CodeTestError(ValueError):
    """Tests of a row that cannot be read."""


@dataclass(frozen=True, slots=True)
class AssertedCall:
    """A call, and its result or the truth of it, as one assert says."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    expected: Any = None
    truth: bool | None = None
    """Where the assert says no more than that: then `expected` is of no account."""
    closeness: Closeness = field(default_factory=Closeness)


def asserted_calls(text: str, entry_point: str = "") -> list[AssertedCall]:
    """Parse the asserts of a text, those of its function `check(candidate)` included.

    Raises:
        CodeTestError: no Python, or a statement of another form, with the reason.
    """
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CodeTestError(f"{_short(text)} is no Python: {error}") from error
    return _calls(body, {}) if not entry_point else _calls(body, {"candidate": entry_point})


def _calls(body: Sequence[ast.stmt], names: Mapping[str, str]) -> list[AssertedCall]:
    found: list[AssertedCall] = []
    for statement in body:
        if isinstance(statement, ast.Assert):
            found.append(_call_of(statement, names))
        elif isinstance(statement, ast.FunctionDef) and statement.name == "check":
            if "candidate" not in names:
                raise CodeTestError("check(candidate) needs the column entry_point, the name of the function")
            found += _calls(statement.body, names)
        elif not _says_nothing(statement):
            raise _refused(statement)
    return found


def _says_nothing(statement: ast.stmt) -> bool:
    """Return whether it is an import, a docstring, `pass` or the METADATA of HumanEval."""
    if isinstance(statement, ast.Assign):
        return [ast.unparse(target) for target in statement.targets] == ["METADATA"]
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass)


def _call_of(statement: ast.Assert, names: Mapping[str, str]) -> AssertedCall:
    said = statement.test
    found = None
    if isinstance(said, ast.Compare) and len(said.ops) == 1:
        found = _compared(said.left, said.ops[0], said.comparators[0], names)
    elif isinstance(said, ast.UnaryOp) and isinstance(said.op, ast.Not):
        found = _called(said.operand, names, truth=False)
    elif isinstance(said, ast.Call):
        found = _is_close(said, names) or _called(said, names, truth=True)
    if found is None:
        raise _refused(statement)
    return found


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr, names: Mapping[str, str]) -> AssertedCall | None:
    if isinstance(operator, ast.Lt | ast.LtE):
        return _near(left, right, names)
    is_name = isinstance(operator, ast.Is) and isinstance(right, ast.Constant)
    if not (isinstance(operator, ast.Eq) or is_name):
        return None
    for call, result in ((left, right), (right, left)):
        literal = _literal(result)
        if literal is not None and (found := _called(call, names, expected=literal[0])):
            return found
    return None


def _near(left: ast.expr, right: ast.expr, names: Mapping[str, str]) -> AssertedCall | None:
    """Parse `abs(f(...) - literal) < literal`."""
    limit = _literal(right)
    if limit is None or not (isinstance(left, ast.Call) and _name(left) == "abs" and len(left.args) == 1):
        return None
    difference = left.args[0]
    if not (isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Sub)):
        return None
    for call, result in ((difference.left, difference.right), (difference.right, difference.left)):
        literal = _literal(result)
        if literal is not None:
            return _called(call, names, expected=literal[0], closeness=Closeness(0.0, float(limit[0])))
    return None


def _is_close(said: ast.Call, names: Mapping[str, str]) -> AssertedCall | None:
    """Parse `math.isclose(f(...), literal, rel_tol=literal)`."""
    if ast.unparse(said.func) not in ("math.isclose", "isclose") or len(said.args) != 2:
        return None
    literal, options = _literal(said.args[1]), {str(each.arg): _literal(each.value) for each in said.keywords}
    if literal is None or not set(options) <= {"rel_tol", "abs_tol"} or None in options.values():
        return None
    numbers = {name: float(value[0]) for name, value in options.items() if value is not None}
    closeness = Closeness(numbers.get("rel_tol", 1e-9), numbers.get("abs_tol", 0.0))
    return _called(said.args[0], names, expected=literal[0], closeness=closeness)


def _called(node: ast.expr, names: Mapping[str, str], **said: Any) -> AssertedCall | None:
    """Parse a call of a plain name with literal arguments; None where it is none."""
    if not isinstance(node, ast.Call) or not _name(node):
        return None
    args = [_literal(each) for each in node.args]
    kwargs = {each.arg: _literal(each.value) for each in node.keywords}
    if None in args or None in kwargs or None in kwargs.values():
        return None
    name = names.get(_name(node), _name(node))
    given = {str(key): value[0] for key, value in kwargs.items() if value is not None}
    return AssertedCall(name, [each[0] for each in args if each is not None], given, **said)


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _literal(node: ast.expr) -> tuple[Any] | None:
    """Return the value of a literal in a tuple, since it may be None; None where it is no literal."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None


def _refused(statement: ast.stmt) -> CodeTestError:
    return CodeTestError(f"{_short(ast.unparse(statement))} is not of a form that can be judged outside: {_FORMS}")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= _SHOWN else line[:_SHOWN] + "...")
