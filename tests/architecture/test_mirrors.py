"""A module's test is found without a search: at the mirrored path, or in one line of `tests/COVERED_BY`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

import pytest
from architecture.source_tree import (
    INIT,
    PACKAGE_FOLDERS,
    PACKAGES,
    ROOT,
    Sources,
    Violation,
    of_package,
    planted,
    real_sources,
    require_at_most,
)

COVERED_BY = ROOT / "tests" / "COVERED_BY"


def read_covered_by(text: str) -> dict[str, str]:
    """The test of each module that has none at the mirrored path; `#` begins a line for people."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    entries = [tuple(part.strip() for part in line.split(":")) for line in lines]
    names = [entry[0] for entry in entries]
    assert all(len(entry) == 2 for entry in entries), "one `module: path of the test` a line"
    assert names == sorted(set(names)), "each module once, in order"
    return {name: path for name, path in entries}


def mirrored_test(module_name: str, package_folder: str) -> str:
    """Where the test of a module stands."""
    *rooms, stem = module_name.split(".")[1:]
    return str(PurePosixPath(package_folder, "tests", *rooms, f"test_{stem}.py"))


def modules_without_a_test(
    sources: Sources, package_folder: str, tests: Collection[str], covered_by: Mapping[str, str]
) -> list[Violation]:
    """Modules that have neither a mirrored test nor a line that names the test that covers them."""
    return [
        Violation(module.name, 1, f"wants {mirrored_test(module.name, package_folder)} or a line in COVERED_BY")
        for module in sources.values()
        if module.stem != INIT
        and mirrored_test(module.name, package_folder) not in tests
        and covered_by.get(module.name) not in tests
    ]


def needless_lines(
    sources: Sources, package_folder: str, tests: Collection[str], covered_by: Mapping[str, str]
) -> list[Violation]:
    """Lines for a module that has a mirrored test, or that is gone."""
    found: list[Violation] = []
    for name in covered_by:
        if name not in sources:
            found.append(Violation(name, 1, "there is no such module"))
        elif mirrored_test(name, package_folder) in tests:
            found.append(Violation(name, 1, f"has a test of its own: {mirrored_test(name, package_folder)}"))
    return found


def real_tests() -> set[str]:
    """Every test file of the workspace, relative to its root."""
    folders = [ROOT / "tests", *(folder / "tests" for folder in PACKAGE_FOLDERS.values())]
    return {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("test_*.py")}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_a_test_that_can_be_found(package: str) -> None:
    sources, tests = of_package(package, real_sources()), real_tests()
    covered_by = read_covered_by(COVERED_BY.read_text())
    mine = {name: path for name, path in covered_by.items() if name.split(".")[0] == package}
    folder = PACKAGE_FOLDERS[package].relative_to(ROOT).as_posix()
    require_at_most(modules_without_a_test(sources, folder, tests, mine), 0)
    require_at_most(needless_lines(sources, folder, tests, mine), 0)


def test_every_line_is_of_a_package() -> None:
    names = read_covered_by(COVERED_BY.read_text())
    assert {name.split(".")[0] for name in names} <= set(PACKAGES)


def test_a_planted_module_without_a_test_is_found() -> None:
    sources = planted(a____init__="", a__room__one="", a__room__two="", a__room__three="", a__four="")
    tests = {"packages/a/tests/room/test_one.py", "packages/a/tests/test_four.py", "tests/cli/test_all.py"}
    covered_by = read_covered_by("# why\na.four: tests/cli/test_all.py\na.gone: tests/cli/test_all.py\n") | {
        "a.room.two": "tests/cli/test_all.py",
        "a.room.three": "tests/cli/test_deleted.py",
    }
    missing = modules_without_a_test(sources, "packages/a", tests, covered_by)
    assert [v.module for v in missing] == ["a.room.three"]
    needless = needless_lines(sources, "packages/a", tests, covered_by)
    assert [v.module for v in needless] == ["a.four", "a.gone"]
