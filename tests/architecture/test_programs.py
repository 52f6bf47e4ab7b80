"""Programs beside the packages (benchmarks, examples, scripts, programs of the tests) import names that exist.

Nothing runs all of them in the test command, and the type checker reads the packages alone: after a rename, this is
what finds a benchmark that would end at its first line.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from architecture.source_tree import PACKAGES, ROOT, Module, Sources, Violation, imported_names, planted, real_sources

FOLDERS = ("benchmarks", "examples", "ci", "tests", "kernels/tests", "kernels/benchmarks")


def programs() -> Iterator[Module]:
    """Every Python file beside the packages' own."""
    folders = [ROOT / folder for folder in FOLDERS] + [path / "tests" for path in (ROOT / "packages").iterdir()]
    files = {file for folder in folders for file in folder.rglob("*.py")}
    for file in sorted(files):
        if not {".venv", "node_modules"} & set(file.relative_to(ROOT).parts):
            yield Module(str(file.relative_to(ROOT)), file.read_text())


def names_of(module: Module) -> set[str]:
    """Names that a module has after its import, in branches and `try` too."""
    names: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def unresolved(module: Module, sources: Sources) -> list[Violation]:
    """Imports of a module or a name that the workspace does not have."""
    by_import = {source.import_name: source for source in sources.values()}
    folders = {source.folder for source in sources.values()}
    found: list[Violation] = []
    for line, target, name in imported_names(module):
        if target.split(".")[0] not in PACKAGES:
            continue
        if target not in by_import and target not in folders:
            found.append(Violation(module.name, line, f"no module {target}"))
            continue
        if name is None or name == "*" or f"{target}.{name}" in by_import or f"{target}.{name}" in folders:
            continue
        here = by_import.get(target)
        if here is None or (name not in names_of(here) and "__getattr__" not in names_of(here)):
            found.append(Violation(module.name, line, f"no {name} in {target}"))
    return found


def test_what_programs_import_exists() -> None:
    sources = real_sources()
    found = [violation for module in programs() for violation in unresolved(module, sources)]
    assert not found, "\n".join(map(str, found))


def test_a_planted_import_of_what_has_moved_is_found() -> None:
    sources = planted(rft__a="class Here: ...\n", rft__room__b="NUMBER = 1\n")
    text = "from rft.a import Here, Gone\nfrom rft.room.b import NUMBER\nimport rft.nowhere\nfrom rft import a\n"
    found = unresolved(Module("program", text), sources)
    assert [violation.what for violation in found] == ["no Gone in rft.a", "no module rft.nowhere"]


def test_programs_of_every_folder_are_read() -> None:
    read = {Path(module.name).parts[0] for module in programs()}
    assert {"benchmarks", "examples", "ci", "tests", "packages", "kernels"} <= read
