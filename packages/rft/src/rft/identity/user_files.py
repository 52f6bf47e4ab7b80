"""Digests of code of a user: a Python file with the files that it imports, a folder, or a function of a script.

No code is run: imports are read from the source.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import cast

from rft.identity.record import Content


def code_content(reference: str) -> Content:
    """Content of a name, or of code given as file.py:name or package.module:name.

    A name stands for code of the installed packages, whose versions are recorded beside it.
    """
    path, colon, name = reference.rpartition(":")
    if colon and (found := module_file(path)) is not None:
        file, folder = found
        return _of_files([file, *imported_files(file, folder)], name, reference)
    if not colon or not path.endswith(".py"):
        return Content(_digest([reference.encode()]), f"{reference} (built in)", reference)
    files = [Path(path).expanduser(), *imported_files(Path(path).expanduser())]
    return _of_files(files, name, reference)


def folder_content(references: str) -> Content:
    """Content of Python files and folders of them, joined by commas, with what they import."""
    files: list[Path] = []
    for part in filter(None, map(str.strip, references.split(","))):
        path = Path(part).expanduser()
        files += sorted(path.glob("*.py")) if path.is_dir() else [path]
    more = [file for first in files for file in imported_files(first)]
    return _of_files(list(dict.fromkeys([*files, *more])), "", references)


def function_content(function: object) -> Content:
    """Content of a function or class of the running program, or of the class of an object that is called.

    Of a method it is the whole class: what a person overrides may be another one of its methods. Of several it is that
    of all of them; one that is a text is code by its name.
    """
    function = getattr(function, "function", function)  # of what calls it as a reward
    if isinstance(function, tuple):
        every = cast("tuple[object, ...]", function)
        contents = [code_content(one) if isinstance(one, str) else function_content(one) for one in every]
        covers = "; ".join(content.covers for content in contents)
        return Content(_digest([content.digest.encode() for content in contents]), covers, contents[0].place)
    if inspect.ismethod(function):
        function = type(function.__self__)
    code = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    name = str(getattr(code, "__qualname__", code))
    try:
        source, file = inspect.getsource(code), inspect.getsourcefile(code) or ""
    except (OSError, TypeError):  # typed at a prompt, or compiled
        return Content(_digest([name.encode()]), f"the name of {name}, whose source cannot be read", "")
    return Content(_digest([name.encode(), source.encode()]), f"the source of {name}", file)


def module_file(module: str) -> tuple[Path, Path] | None:
    """Return the file of a module, and the folder from which it is imported; None where it is none that can be seen.

    Its package is not imported.
    """
    parts = module.split(".")
    if not all(map(str.isidentifier, parts)) or parts[-1] == "py":
        return None
    try:
        spec = importlib.util.find_spec(parts[0])
    except ValueError:  # a module that was made by hand
        spec = None
    # as where it is called: the working directory is the last place
    folder = Path(spec.origin).parents[int(bool(spec.submodule_search_locations))] if spec and spec.origin else Path()
    path = folder.joinpath(*parts)
    for candidate in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate, folder
    return None


def imported_files(file: Path, root: Path | None = None) -> list[Path]:
    """Files that `file` imports, and those that these import: beside them, or in the folder `root` of its package."""
    found: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        for path in _neighbours(waiting.pop(), root):
            if path != file and path not in found:
                found[path] = None
                waiting.append(path)
    return sorted(found)


def _of_files(files: list[Path], name: str, reference: str) -> Content:
    absent = [file for file in files if not file.is_file()]
    if absent:  # the part that reads it says so, with a remedy
        return Content("absent", f"{absent[0]} is absent", reference)
    # by their names beside one another, so that a folder may be moved
    parts: list[bytes] = [name.encode()]
    for file in files:
        parts += [file.name.encode(), file.read_bytes()]
    used = sorted({module for file in files for module in _modules_of(file)})
    versions = [f"{module} {found}" for module in used if (found := _version(module))]
    parts += [text.encode() for text in versions]
    more = len(files) - 1
    covers = files[0].name if files else "no file"
    covers += f" and {more} {'file' if more == 1 else 'files'} with it" if more > 0 else ""
    covers += f", with {', '.join(versions)}" if versions else ""
    return Content(_digest(parts), covers, reference)


def _neighbours(file: Path, root: Path | None) -> Iterator[Path]:
    """Yield the files of modules and packages that `file` imports from its own folder or from `root`."""
    package = file.parent.relative_to(root).parts[:1] if root is not None else ()
    for module in _imports(file):
        parts = module.split(".")
        # of `root` only the package itself: beside an installed one stand all others
        folders = [file.parent, *([root] if root is not None and parts[:1] == list(package) else [])]
        for folder, end in product(folders, range(1, len(parts) + 1)):
            path = folder.joinpath(*parts[:end])
            for candidate in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
                if candidate.is_file():
                    yield candidate


def _modules_of(file: Path) -> set[str]:
    """Return the first names of the imported modules that are neither beside the file nor of Python itself."""
    names = {module.partition(".")[0] for module in _imports(file)}
    here = {name for name in names if (file.parent / f"{name}.py").is_file() or (file.parent / name).is_dir()}
    return names - here - sys.stdlib_module_names


def _imports(file: Path) -> Iterator[str]:
    """Yield dotted names that a Python file imports; a file that is no Python imports none."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if base:
                yield base
            # `from package import module` names a file too
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")


def _version(module: str) -> str:
    """Return the version of an installed package of this name; empty where there is none, or it is one of ours."""
    if module.startswith("rft"):
        return ""  # compared by itself
    try:
        return version(module)
    except (PackageNotFoundError, ValueError):
        return ""


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # lengths too: parts that share the same bytes out differently must not look alike
        digest.update(f"{len(part)}\0".encode())
        digest.update(part)
    return digest.hexdigest()
