"""A fault meets the tests that reach its line, in whatever process they reach it, and those alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "ci"))

from mutation.whole_runs import WholeRuns  # noqa: E402

MODULE = Path("packages/p/src/p/numbers.py")
SOURCE = """LIMIT = 3


def doubled(x):
    return 2 * x


def tripled(x):
    return LIMIT * x


def unused(x):
    return x + 1
"""
TESTS = """import subprocess
import sys

import pytest

from p.numbers import doubled, tripled

pytestmark = pytest.mark.xdist_group("numbers")


@pytest.fixture(scope="module")
def shared():
    return tripled(4)


def test_first(shared):
    assert shared


def test_second(shared):
    assert shared == 12


@pytest.mark.parametrize("x", [1, 2])
def test_doubled(x):
    assert doubled(x) == x + x


def test_in_a_process_of_its_own():
    words = [sys.executable, "-c", "from p.numbers import doubled; print(doubled(5))"]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "10\\n"


def test_that_fails_anyway():
    assert False
"""
FILE = "packages/p/tests/test_numbers.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> WholeRuns:
    root = tmp_path_factory.mktemp("workspace")
    (root / MODULE).parent.mkdir(parents=True)
    (root / MODULE).write_text(SOURCE)
    (root / FILE).parent.mkdir()
    (root / FILE).write_text(TESTS)
    for folder in ("kernels", "tests"):
        (root / folder).mkdir()
    (root / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group\n")
    return WholeRuns(root, tmp_path_factory.mktemp("reach"), 1)


def line_of(text: str) -> int:
    return SOURCE[: SOURCE.index(text)].count("\n") + 1


def reaching(runs: WholeRuns, text: str) -> set[str]:
    return {test.partition("::")[2] for test in runs.reach.tests(MODULE, line_of(text))}


def test_a_line_has_the_tests_that_reach_it(runs: WholeRuns) -> None:
    everything = {"test_first", "test_second", "test_doubled[1]", "test_doubled[2]", "test_in_a_process_of_its_own"}
    assert runs.reach.failing == [f"{FILE}::test_that_fails_anyway"]
    assert reaching(runs, "    return 2 * x") == everything - {"test_first", "test_second"}
    # a fixture that tests share belongs to all that may use it, and what an import runs to all that import it
    assert reaching(runs, "    return LIMIT * x") == reaching(runs, "LIMIT = 3") == everything
    assert reaching(runs, "    return x + 1") == set()


@pytest.mark.parametrize(
    ("before", "after", "killer"),
    [
        ("return 2 * x", "return 3 * x", "test_"),
        ("LIMIT = 3", "LIMIT = 4", "test_second"),
        ("return x + 1", "return x + 2", None),
        ("return 2 * x", "return x + x", None),
    ],
)
def test_a_fault_is_noticed_or_survives_and_is_gone_afterwards(
    runs: WholeRuns, before: str, after: str, killer: str | None
) -> None:
    name = runs.killer(MODULE, SOURCE[: SOURCE.index(before)].count("\n") + 1, SOURCE.replace(before, after).encode())
    assert (name is None) == (killer is None)
    assert killer is None or (name or "").startswith(f"{FILE}::{killer}")
    assert (runs.reach.tree / MODULE).read_text() == SOURCE
