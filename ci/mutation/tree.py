"""The modules that are mutated, their tests, and the equivalents that were proved."""

from __future__ import annotations

import ast
import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mutation.operators import Mutant, mutants

ROOT = Path(__file__).parents[2]
EQUATIONS = "rft-algos"
"""The package that is mutated unless another is named: pure functions, whose tests are all quick."""
OTHERS = ("rft-trainer", "rft-models", "rft-dist", "rft-engine", "rft", "rft-genrec", "rft-cli")
"""Packages that do things, mutated with more operators and tested by the files that concern a module."""
PACKAGE = ROOT / "packages" / EQUATIONS
EQUIVALENTS = ROOT / "ci/mutation_equivalents.json"
NOT_RUN = ("test_package",)
"""Tests of texts."""
NOT_MUTATED = ("settings", "testing", "pages", "tasks")
"""Rooms and modules outside of the equations that hold declarations, doubles, texts or made-up data."""


def select(package: str) -> None:
    """Mutate this package from now on; rft-algos is selected at the start."""
    global PACKAGE
    PACKAGE = ROOT / "packages" / package
    _forget()


def package_name() -> str:
    """The name of the selected package, such as rft-trainer."""
    return PACKAGE.name


def import_name() -> str:
    """The name by which it is imported, such as rft_trainer."""
    return PACKAGE.name.replace("-", "_")


def is_wider() -> bool:
    """Whether the selected package is one of those that do things."""
    return PACKAGE.name != EQUATIONS


def _forget() -> None:
    for function in (sources, tests_of, _reached, _imported):
        function.cache_clear()


class Refused(Exception):
    """The run says nothing about the tests; its text says why."""


def snapshot(folder: Path) -> None:
    """Copy the package and read it from there: an edit during a run would put faults in wrong places.

    Args:
        folder: empty, and kept until the run is over.
    """
    global PACKAGE, ROOT
    copied = folder / "packages" / PACKAGE.name
    if is_wider():  # tests of other packages may cover its modules, and share the fixtures of the workspace
        for package in (ROOT / "packages").iterdir():
            _copy(package / "tests", folder / "packages" / package.name / "tests")
        _copy(ROOT / "tests" / "support", folder / "tests" / "support")
        for file in ("conftest.py", "tests/tier2_cases.txt", "tests/night_cases.txt", "tests/COVERED_BY"):
            shutil.copy(ROOT / file, folder / file)
    else:
        _copy(PACKAGE / "tests", copied / "tests")
    _copy(PACKAGE / "src", copied / "src")
    PACKAGE, ROOT = copied, folder
    _forget()


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


@cache
def sources() -> dict[str, Path]:
    """The file of every module of the package, by its name below it with dots; folders end in .__init__."""
    found: dict[str, Path] = {}
    folder = PACKAGE / "src" / import_name()
    for path in sorted(folder.rglob("*.py")):
        found[".".join(path.relative_to(folder).with_suffix("").parts)] = path
    return found


def mutated_modules() -> dict[str, Path]:
    """Those of them that are mutated; outside of the equations those that a test without whole runs covers."""
    found = {name: path for name, path in sources().items() if name.rpartition(".")[2] != "__init__"}
    if not is_wider():
        return found
    kept = {name: path for name, path in found.items() if not set(NOT_MUTATED) & set(name.split("."))}
    return {name: path for name, path in kept.items() if tests_of(name).by_name}


def all_mutants() -> dict[str, list[Mutant]]:
    """Every mutant of every module."""
    return {name: mutants(name, path.read_bytes(), wider=is_wider()) for name, path in mutated_modules().items()}


def test_files() -> list[Path]:
    """Every file of tests that may notice a mutant."""
    return [path for path in sorted((PACKAGE / "tests").rglob("test_*.py")) if path.stem not in NOT_RUN]


@dataclass(frozen=True, slots=True)
class Files:
    """Which files test a module."""

    by_name: list[Path]
    """Those called after it."""
    others: list[Path]
    """The rest of those that import it, through whatever modules."""


@cache
def tests_of(module: str) -> Files:
    """Files that test a module, by their names and their imports.

    Args:
        module: such as surrogates.ppo.

    Returns:
        surrogates/test_ppo.py, others there that begin with test_ppo_, and surrogates/test_contract.py first, as far
        as they are there. Outside of the equations: the module's own file, or that of its line in tests/COVERED_BY
        where it is the test of a package; then those of the package that import it by name.
    """
    room, _, last = module.rpartition(".")
    folder = PACKAGE / "tests" / room.replace(".", "/")
    if is_wider():
        named = [folder / f"test_{last}.py", *sorted(folder.glob(f"test_{last}_*.py"))]
        row = covered_by().get(f"{import_name()}.{module}", "")
        covering = [ROOT / row] if row.startswith("packages/") else []
        near = [path for path in dict.fromkeys([*named, *covering]) if path.is_file()]
        return Files(near, [path for path in test_files() if path not in near and module in _imported(path)])
    by_name: list[Path] = []
    rest: list[Path] = []
    for path in test_files():
        if module not in _reached(path):
            continue
        named = path.stem in (f"test_{last}", "test_contract") or path.stem.startswith(f"test_{last}_")
        (by_name if named and path.parent == folder else rest).append(path)
    return Files(by_name, rest)


def covered_by() -> dict[str, str]:
    """The test of each module without one of its own, from tests/COVERED_BY."""
    lines = (ROOT / "tests" / "COVERED_BY").read_text().splitlines()
    pairs = [line.partition(":") for line in lines if line.strip() and not line.startswith("#")]
    return {name.strip(): path.strip() for name, _, path in pairs}


@cache
def _reached(path: Path) -> frozenset[str]:
    """Modules that a file imports, through whatever modules."""
    reached: set[str] = set()
    waiting = set(_imported(path))
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting |= _imported(sources()[name])
    return frozenset(reached)


@cache
def _imported(path: Path) -> frozenset[str]:
    """Modules that a file itself imports, and the packages they lie in."""
    words: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            words |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            words |= {f"{node.module}.{alias.name}" for alias in node.names}
    names = sources()
    found: set[str] = set()
    for word in words:
        parts = word.split(".")
        if parts[0] != import_name():
            continue
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[1:end])
            found |= {name, f"{name}.__init__".lstrip(".")} & names.keys()
    return frozenset(found)


def equivalents(found: dict[str, list[Mutant]]) -> dict[str, str]:
    """The proofs of ci/mutation_equivalents.json by the ids that the mutants have now.

    A proof whose line moved stays with it if that is beyond doubt.

    Args:
        found: every mutant of every module.

    Returns:
        Proof by id.

    Raises:
        Refused: if an id names no mutant any more, or a proof is missing.
    """
    proofs: dict[str, str] = json.loads(EQUIVALENTS.read_text()) if EQUIVALENTS.exists() else {}
    known = {mutant.id: mutant for group in found.values() for mutant in group}
    placed: dict[str, str] = {}
    for name, proof in proofs.items():
        if not proof.strip():
            raise Refused(f"{EQUIVALENTS.name}: {name} has no proof")
        module, _, column, operator, digest = name.split(":")
        key = (module, int(column), operator, digest)
        candidates = [name] if name in known else [m.id for m in known.values() if m.unplaced == key]
        if len(candidates) != 1:
            raise Refused(f"{EQUIVALENTS.name}: {name} is no mutant any more: remove it, or prove the new line")
        placed[candidates[0]] = proof
    if len(placed) != len(proofs):
        raise Refused(f"{EQUIVALENTS.name}: two ids name one mutant")
    return placed
