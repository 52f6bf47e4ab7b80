"""Meaning of each setting: the text under its field in the source, from which help and reference pages are made."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache


@cache
def meanings(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass and of those it extends, on one line, by the field's name."""
    texts: dict[str, str] = {}
    # parents first, so that the text of the class itself wins
    for base in reversed(kind.__mro__[:-1]):
        [body] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for node, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = following.value if isinstance(following, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    texts[node.target.id] = " ".join(text.value.split())
    return texts
