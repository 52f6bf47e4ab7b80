"""The shipped modules as the rules of this folder read them: each file parsed and walked once a process."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE_FOLDERS = {
    "rft_kernels" if path.name == "kernels" else path.name.replace("-", "_"): path
    for path in [*sorted((ROOT / "packages").iterdir()), ROOT / "kernels"]
}
"""The folder of each package, by the name that Python imports."""
PACKAGES = list(PACKAGE_FOLDERS)
INIT = "__init__"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    """Dotted path of the file below `src`; a package's own file ends with `.__init__`."""
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree: walked once, because each rule reads all of them."""
        return tuple(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """The package that ships this module."""
        return self.name.split(".")[0]

    @property
    def stem(self) -> str:
        """The file's name without its suffix."""
        return self.name.split(".")[-1]

    @property
    def folder(self) -> str:
        """The dotted path of the folder that holds this file."""
        return self.name.rpartition(".")[0]

    @property
    def import_name(self) -> str:
        """What other modules write after `import`."""
        return self.folder if self.stem == INIT else self.name


Sources = Mapping[str, Module]
"""Modules by their name."""


class Violation(NamedTuple):
    """One place where a rule is broken."""

    module: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.what}"


def planted(**texts: str) -> Sources:
    """Sources made of texts, for the tests that show that a rule can fail; `__` stands for a dot in a name."""
    dotted = {name.replace(INIT, "\0").replace("__", ".").replace("\0", INIT): text for name, text in texts.items()}
    return {name: Module(name, text) for name, text in dotted.items()}


@functools.cache
def real_sources() -> Sources:
    """Every module that the workspace ships."""
    sources: dict[str, Module] = {}
    gc.disable()  # half a million nodes live to the end: looking for garbage among them takes longer than parsing
    for package, folder in PACKAGE_FOLDERS.items():
        source = folder / "src"
        for path in sorted((source / package).rglob("*.py")):
            name = ".".join(path.relative_to(source).with_suffix("").parts)
            sources[name] = Module(name, path.read_text())
            assert sources[name].nodes
    gc.freeze()
    gc.enable()
    return sources


def of_package(package: str, sources: Sources) -> Sources:
    """The modules that one package ships."""
    return {name: module for name, module in sources.items() if module.package == package}


def imported_names(module: Module) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name or None) of every import, at the top or inside a function, typing-only ones included."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.name.split(".")[: -node.level]
                base = ".".join([*parents, *([base] if base else [])])
            yield from ((node.lineno, base, alias.name) for alias in node.names)


def import_graph(sources: Sources) -> dict[str, set[str]]:
    """Which modules each module imports; `from a import b` means the module `a.b` where there is one, and `a` else."""
    by_import_name = {module.import_name: name for name, module in sources.items()}
    graph: dict[str, set[str]] = {}
    for name, module in sources.items():
        targets: set[str | None] = set()
        for _, base, member in imported_names(module):
            targets.add(by_import_name.get(f"{base}.{member}") or by_import_name.get(base))
        graph[name] = {target for target in targets if target is not None and target != name}
    return graph


def docstring_owners(
    tree: ast.Module,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The module, its classes and their functions; not what a function defines inside itself."""
    yield tree
    bodies: list[ast.AST] = [tree]
    while bodies:
        for node in ast.iter_child_nodes(bodies.pop()):
            if isinstance(node, ast.ClassDef):
                yield node
                bodies.append(node)
            elif isinstance(node, FunctionNode):
                yield node
            elif isinstance(node, ast.If | ast.Try | ast.With):
                bodies.append(node)


def per_package(violations: Iterable[Violation]) -> dict[str, int]:
    """How many violations each package has."""
    counts = dict.fromkeys(PACKAGES, 0)
    for violation in violations:
        package = violation.module.split(".")[0]
        counts[package] = counts.get(package, 0) + 1
    return counts


def per_module(violations: Iterable[Violation]) -> dict[str, int]:
    """How many violations each module has, modules without one left out."""
    counts: dict[str, int] = {}
    for violation in violations:
        counts[violation.module] = counts.get(violation.module, 0) + 1
    return dict(sorted(counts.items()))


def require_at_most(violations: list[Violation], ceiling: int) -> None:
    """Fail where there are more violations than when the ceiling was set, and show all of them."""
    listed = "\n".join(f"  {violation}" for violation in violations)
    assert len(violations) <= ceiling, f"{len(violations)} where the ceiling is {ceiling}:\n{listed}"


def require_listed(violations: list[Violation], ceilings: Mapping[str, int]) -> None:
    """Fail where a module has more violations than its ceiling; a module without one may have none."""
    counts = per_module(violations)
    above = {name for name, count in counts.items() if count > ceilings.get(name, 0)}
    shown = "\n".join(f"  {violation}" for violation in violations if violation.module in above)
    limits = {name: f"{counts[name]}, ceiling {ceilings.get(name, 0)}" for name in sorted(above)}
    assert not above, f"{limits}\n{shown}"


def require_needed(listed: Iterable[str], needed: Iterable[str]) -> None:
    """Fail where a list of exceptions has an entry that nothing needs any more."""
    stale = sorted(set(listed) - set(needed))
    assert not stale, f"no longer needed, delete these entries: {stale}"
