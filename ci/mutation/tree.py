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
PACKAGE = ROOT / "packages/rft-algos"
EQUIVALENTS = ROOT / "ci/mutation_equivalents.json"
NOT_RUN = ("test_package",)
"""Tests of texts."""


class Refused(Exception):
    """The run says nothing about the tests; its text says why."""


def snapshot(folder: Path) -> None:
    """Copy the package and read it from there: an edit during a run would put faults in wrong places.

    Args:
        folder: empty, and kept until the run is over.
    """
    global PACKAGE
    for part in ("src", "tests"):
        shutil.copytree(PACKAGE / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    PACKAGE = folder
    for function in (sources, tests_of, _reached):
        function.cache_clear()


@cache
def sources() -> dict[str, Path]:
    """The file of every module below rft_algos, by its name with dots; packages end in .__init__."""
    found: dict[str, Path] = {}
    folder = PACKAGE / "src/rft_algos"
    for path in sorted(folder.rglob("*.py")):
        found[".".join(path.relative_to(folder).with_suffix("").parts)] = path
    return found


def mutated_modules() -> dict[str, Path]:
    """Those of them that are mutated."""
    return {name: path for name, path in sources().items() if name.rpartition(".")[2] != "__init__"}


def all_mutants() -> dict[str, list[Mutant]]:
    """Every mutant of every module."""
    return {name: mutants(name, path.read_bytes()) for name, path in mutated_modules().items()}


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
        as they are there.
    """
    room, _, last = module.rpartition(".")
    folder = PACKAGE / "tests" / room.replace(".", "/")
    by_name: list[Path] = []
    rest: list[Path] = []
    for path in test_files():
        if module not in _reached(path):
            continue
        named = path.stem in (f"test_{last}", "test_contract") or path.stem.startswith(f"test_{last}_")
        (by_name if named and path.parent == folder else rest).append(path)
    return Files(by_name, rest)


@cache
def _reached(path: Path) -> frozenset[str]:
    """Modules that a file imports, through whatever modules."""
    reached: set[str] = set()
    waiting = _imported(path)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting |= _imported(sources()[name])
    return frozenset(reached)


def _imported(path: Path) -> set[str]:
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
        if parts[0] != "rft_algos":
            continue
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[1:end])
            found |= {name, f"{name}.__init__".lstrip(".")} & names.keys()
    return found


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
