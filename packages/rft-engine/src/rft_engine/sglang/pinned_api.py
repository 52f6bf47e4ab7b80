"""Calls and fields of the pinned SGLang release, taken from its source (`ci/sglang_surface.py` refreshes it)."""

from __future__ import annotations

import ast
import inspect
import json
from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Any

_SNAPSHOT = Path(__file__).with_suffix(".json")


@cache
def surface() -> dict[str, Any]:
    """The snapshot: version, calls, fields, attributes, and digests of functions that are relied upon."""
    snapshot: dict[str, Any] = json.loads(_SNAPSHOT.read_text())
    return snapshot


def version() -> str:
    """The release that the adapter follows."""
    return str(surface()["version"])


@cache
def signature(name: str) -> inspect.Signature:
    """Return the signature of a method such as "Engine.async_generate", with `self`; defaults are source text."""
    arguments = _arguments(surface()["calls"][name].removeprefix("async "))
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    rows = [_parameter(a, Parameter.POSITIONAL_OR_KEYWORD, d) for a, d in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        rows.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    rows += [_parameter(argument, Parameter.KEYWORD_ONLY, default) for argument, default in pairs]
    if arguments.kwarg:
        rows.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return inspect.Signature(rows)


def unknown_fields(name: str, values: dict[str, Any]) -> list[str]:
    """Keys of `values` that the class `name` does not have."""
    return sorted(values.keys() - surface()["fields"][name].keys())


def _arguments(text: str) -> ast.arguments:
    [function] = ast.parse(f"def function{text}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return function.args


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> Parameter:
    return Parameter(argument.arg, kind, default=Parameter.empty if default is None else ast.unparse(default))
