"""Expressions of a chat template that could make a text of gigabytes in one operation, found before it is run.

A template comes with a model's directory. Jinja's sandbox keeps it from the interpreter, and `time_limit` from running
or growing without end; neither can stop one multiplication that is under way.
"""

from __future__ import annotations

import re
from functools import lru_cache

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST = 1000
"""The largest factor, width or number of places that a template may use."""
_PADDING = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs", "indent"))
"""Methods and filters that make a text as long as they are told."""
_WIDTH = re.compile(r"[%:][^%{}]{0,9}?[0-9]{4,}")
"""A width in a format such as "%9999d" or "{:>9999}"."""
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_ENVIRONMENT = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])


@lru_cache(maxsize=64)
def oversized(template: str) -> str:
    """Return the first expression of a template whose result may be of any size, with its line; empty without any.

    Of a template that does not parse, nothing is said here.
    """
    try:
        # tags of transformers, which no other environment knows
        tree = _ENVIRONMENT.parse(_GENERATION.sub("", template))
    except (jinja2.TemplateError, RecursionError, ValueError):
        return ""
    for node in tree.find_all((nodes.Mul, nodes.Pow, nodes.Call, nodes.Filter, nodes.Mod)):
        said = _fault(node)
        if said:
            return f"{said} in line {node.lineno}"
    return ""


def _fault(node: nodes.Node) -> str:
    if isinstance(node, nodes.Pow):
        return "a power"
    if isinstance(node, nodes.Mul):
        return "" if _is_small(node.left) or _is_small(node.right) else "a product without a small factor"
    if isinstance(node, nodes.Mod):
        return _format_fault(node.left)
    if isinstance(node, nodes.Filter):
        arguments, name, text = node.args, node.name, node.node
    elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        arguments, name, text = node.args, node.node.attr, node.node.node
    else:
        return ""
    if name == "format" and text is not None:
        return _format_fault(text)
    keywords = [pair.value for pair in getattr(node, "kwargs", None) or []]
    widths = [argument for argument in (*arguments, *keywords) if not _is_text(argument)]
    if name in _PADDING and not all(map(_is_small, widths)):
        return f"{name} without a small width"
    return ""


def _format_fault(text: nodes.Node) -> str:
    """Return what is wrong with a format that stands in the template."""
    is_wide = isinstance(text, nodes.Const) and isinstance(text.value, str) and _WIDTH.search(text.value)
    return "a format with a large width" if is_wide else ""


def _is_small(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Neg):
        node = node.node
    return isinstance(node, nodes.Const) and isinstance(node.value, int | float) and node.value <= MOST


def _is_text(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)
