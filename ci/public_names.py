"""Pages on the public names of the library and of the equations: signature and first paragraph of each.

docs/reference/python-rft.md          what `import rft` gives, by the module that has it
docs/reference/python-rft-algos.md    what `from rft_algos import ...` gives
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from module_tables import first_sentence

import rft
import rft_algos.aliases

DOCS = Path(__file__).parents[1] / "docs"
MOST_CHARACTERS = 110
"""A signature that is longer has a line a parameter."""


def pages() -> dict[Path, str]:
    """Both pages by their files."""
    folder = DOCS / "reference"
    return {
        folder / "python-rft.md": page(rft, "rft", "What `import rft` gives ([guide](../python.md))."),
        folder / "python-rft-algos.md": page(
            rft_algos.aliases,
            "rft_algos",
            "What `from rft_algos import ...` gives: the equations, with torch alone ([algorithms](../algorithms.md)).",
        ),
    }


def page(module: ModuleType, title: str, about: str) -> str:
    """A section for each module that has public names, and in it one for each of its names."""
    lines = [f"# Public names of `{title}`", "", f"{about} Generated from the code by `ci/generate_reference.py`."]
    names = sorted(module.__all__, key=lambda name: (_home(getattr(module, name)), name.lower()))
    home = ""
    for name in names:
        thing = getattr(module, name)
        if _home(thing) != home:
            home = _home(thing)
            lines += ["", f"## {home}", "", _module_text(home)]
        lines += ["", f"### {title}.{name}", "", *_entry(name, thing)]
    return "\n".join(lines) + "\n"


def _home(thing: Any) -> str:
    """The module that defines it; constants have none and stand in the package itself."""
    return getattr(thing, "__module__", None) or type(thing).__module__


def _module_text(name: str) -> str:
    found = inspect.getsourcefile(__import__(name, fromlist=["_"]))
    assert found is not None
    return first_sentence(Path(found)).replace("\\|", "|")


def _entry(name: str, thing: Any) -> list[str]:
    """Signature and text; a second name of a function refers to the first."""
    own = getattr(thing, "__name__", name)
    if own != name:
        return [f"Another name of `{own}`."]
    if not callable(thing):
        return [f"A constant of the type `{type(thing).__name__}`."]
    lines = ["```python", signature(name, thing), "```", "", paragraph(thing)]
    if not inspect.isclass(thing):
        return lines
    methods = [
        f"- `{_on_one_line(method, member)}`: {paragraph(member)}"
        for method, member in vars(thing).items()
        if not method.startswith("_") and inspect.isfunction(member) and member.__doc__
    ]
    return [*lines, "", *methods] if methods else lines


def paragraph(thing: Any) -> str:
    """The first paragraph of its docstring as one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def signature(name: str, thing: Any) -> str:
    """The call as it would be written, on one line where it fits."""
    line = _on_one_line(name, thing)
    if len(line) <= MOST_CHARACTERS:
        return line
    parts: list[str] = []
    for text, parameter in zip(_parameters(thing), _public(thing), strict=True):
        if parameter.kind is parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(text)
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){_returns(thing)}"


def _parameters(thing: Any) -> list[str]:
    return [_plain(str(parameter)) for parameter in _public(thing)]


def _public(thing: Any) -> list[inspect.Parameter]:
    """Parameters that a caller gives."""
    return [found for found in inspect.signature(thing).parameters.values() if not found.name.startswith("_")]


def _returns(thing: Any) -> str:
    if inspect.isclass(thing):
        return ""
    annotation = inspect.signature(thing).return_annotation
    return "" if annotation is inspect.Signature.empty else f" -> {_plain(inspect.formatannotation(annotation))}"


def _on_one_line(name: str, thing: Any) -> str:
    found = inspect.signature(thing).replace(parameters=_public(thing))
    return f"{name}{_plain(str(found if not inspect.isclass(thing) else found.replace(return_annotation=found.empty)))}"


def _plain(text: str) -> str:
    """Annotations without quotes, defaults without addresses, names without the path of their module."""
    text = re.sub(r"'([^']*)'", lambda match: match[1] if re.search(r"[A-Za-z]", match[1]) else match[0], text)
    text = re.sub(r"<(?:function|class|factory|object)?\s?'?([\w.]*)[^>]*>", r"...", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+([A-Z]\w*)", r"\1", text)
