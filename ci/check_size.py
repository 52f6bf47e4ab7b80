"""The ten largest files and functions of the code, so that what grows is seen while it is small.

Ends with 1 where a file is above the limit. A function above its limit is shown and wants a reason.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE_LIMIT, FUNCTION_LIMIT = 500, 60


def sources() -> list[Path]:
    """Every file of code that is shipped."""
    return sorted(path for part in ("packages/*/src", "kernels/src") for path in ROOT.glob(f"{part}/**/*.py"))


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines without the docstring, place) of every function."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = (ast.get_docstring(node) or "").count("\n") + bool(ast.get_docstring(node))
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - documented
            found.append((lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return found


def main() -> int:
    """Print both lists and the medians; the exit code."""
    files = sorted(((path.read_text().count("\n"), str(path.relative_to(ROOT))) for path in sources()), reverse=True)
    longest = sorted((row for path in sources() for row in functions(path)), reverse=True)
    for title, rows, limit in (("files", files, FILE_LIMIT), ("functions", longest, FUNCTION_LIMIT)):
        print(
            f"{len(rows)} {title}, median {rows[len(rows) // 2][0]} lines, the largest (above {limit} wants a reason):"
        )
        for lines, place in rows[:10]:
            print(f"  {lines:>4}  {place}")
    return int(files[0][0] > FILE_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
