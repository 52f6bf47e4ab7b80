"""Tables of a package's rooms and modules, from the first sentences of their docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path


def first_sentence(path: Path) -> str:
    """The first paragraph of a module's docstring as one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def rooms(source: Path) -> list[Path]:
    """Folders of a package that hold modules, the package's root first."""
    return sorted({path.parent for path in source.rglob("*.py")})


def room_list(packages: Iterable[Path]) -> str:
    """A row for each package and for each of its rooms, in the order given; `packages` are import folders."""
    lines = ["| room | what is in it |", "|---|---|"]
    for source in packages:
        lines.append(f"| **`{source.name}`** | *{first_sentence(source / '__init__.py')}* |")
        for room in rooms(source)[1:]:
            name = ".".join((source.name, *room.relative_to(source).parts))
            lines.append(f"| `{name}` | {first_sentence(room / '__init__.py')} |")
    return "\n".join(lines)


def module_table(source: Path) -> str:
    """A heading row for each room, then a row for each of its modules; `source` is the package's import folder."""
    lines = ["| module | what is in it |", "|---|---|"]
    for room in rooms(source):
        name = ".".join(room.relative_to(source).parts)
        if name:
            lines.append(f"| **`{name}`** | *{first_sentence(room / '__init__.py')}* |")
        for path in sorted(room.glob("*.py")):
            if path.stem != "__init__":
                lines.append(f"| `{f'{name}.' if name else ''}{path.stem}` | {first_sentence(path)} |")
    return "\n".join(lines)
