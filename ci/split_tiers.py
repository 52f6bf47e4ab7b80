"""Choose which test cases run in tier 2 alone, from the durations of a run of all tests.

    pytest -n 2 --dist loadgroup -m "full or not full" --junitxml all.xml
    python ci/split_tiers.py all.xml

    pytest -n 2 --dist loadgroup --junitxml tier1.xml
    python ci/split_tiers.py tier1.xml --keep        # tier 1 has become slow: move more of its cases

    pytest -n 2 --dist loadgroup -m full --junitxml tier2.xml
    python ci/split_tiers.py tier2.xml --night 4000  # tier 2 has become slow: 4,000 s of both workers together are left

Writes tests/tier2_cases.txt, one node id a line. `conftest.py` gives these cases the marker `full`. Of a test function
whose cases take long together, the quickest stay in tier 1, at least one if it is quick enough, so that every kind of
test is represented there; a case that nobody may leave out is named in ALWAYS. With --night it adds to
tests/night_cases.txt the longest cases of tier 2, of each function all but the quickest; those cases get the marker
`night`.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "tests" / "tier2_cases.txt"
NIGHT = ROOT / "tests" / "night_cases.txt"
SECONDS_OF_A_FUNCTION = 1.0
"""The quickest cases of a test function stay in tier 1 while they take less together."""
SECONDS_OF_A_CASE = 1.2
"""The most that the one case of a long function may take to stay."""
SECONDS_OF_A_QUICK_CASE = 0.15
"""A case that takes no longer stays in tier 1, however many of them its function has."""
ALWAYS = (
    "tests/architecture/*",
    "tests/additions/*",
    "tests/cli/test_generated_pages.py::*",
    "tests/faults/test_kill.py::test_a_quickstart_killed*",
    "tests/invariants/test_mutants.py::test_of_a_few_mutants*",
)
"""Node ids, as patterns, that stay in tier 1 whatever they take."""

SHARED_SETUP = (
    "tests/invariants/test_strategies.py::*",
    "tests/invariants/test_lora_ranks.py::*",
    "tests/integration/test_quickstart.py::*",
    "tests/integration/test_gsm8k.py::*",
    "tests/integration/test_async_rollouts.py::*",
    "tests/faults/test_disk.py::*",
    "tests/invariants/test_cuts.py::test_two_ranks_resumed*",
    "tests/invariants/test_cuts.py::test_a_rank_that_dies*",
    "tests/invariants/test_cuts.py::test_a_disk_that_refuses*",
    "tests/invariants/test_meta_init.py::*",
    "packages/rft-dist/tests/strategies/zero/test_optimizer.py::*",
    "packages/rft-dist/tests/strategies/test_fsdp.py::*",
    "packages/rft-dist/tests/strategies/test_tensor_parallel.py::*",
    "packages/rft-dist/tests/strategies/test_two_ranks.py::*",
    "packages/rft-dist/tests/strategies/test_fp16_and_ema.py::*",
    "tests/additions/test_strategy.py::test_two_ranks*[[]parameter_server]",
)
"""Tier 2 as patterns: a launch of ranks or a whole run that several cases read, whose cost the case that stays pays."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test case of the measured run."""

    function: str
    """Node id without parameters."""
    node_id: str
    seconds: float
    """Set-up, call and tear-down."""


def cases_of(path: Path, scale: float) -> list[Case]:
    """Read the cases of a JUnit file; their times are divided by `scale`, for a machine that was busy."""
    cases = []
    for element in ElementTree.parse(path).getroot().iter("testcase"):
        name, _, group = element.attrib["name"].rpartition("@") if "@" in element.attrib["name"] else ("", "", "")
        name = name if name and group.isidentifier() else element.attrib["name"]
        file = element.attrib["classname"].replace(".", "/") + ".py"
        function = f"{file}::{name.partition('[')[0]}"
        cases.append(Case(function, f"{file}::{name}", float(element.attrib["time"]) / scale))
    return cases


def _shares_setup(case: Case) -> bool:
    return any(fnmatch(case.node_id, pattern) for pattern in SHARED_SETUP)


def tier_2(cases: list[Case]) -> list[Case]:
    """The cases that tier 1 leaves out."""
    by_function: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_function[case.function].append(case)
    left_out: list[Case] = []
    for group in by_function.values():
        left_out += [case for case in group if _shares_setup(case)]
        group = [case for case in group if not _shares_setup(case)]
        long = sum(case.seconds for case in group) > SECONDS_OF_A_FUNCTION
        if not long or any(fnmatch(group[0].node_id, pattern) for pattern in ALWAYS):
            continue
        kept = 0.0
        for number, case in enumerate(sorted(group, key=lambda case: (case.seconds, case.node_id))):
            kept += case.seconds
            is_long = case.seconds > SECONDS_OF_A_QUICK_CASE
            if is_long and kept > (SECONDS_OF_A_CASE if number == 0 else SECONDS_OF_A_FUNCTION):
                left_out.append(case)
    return left_out


def of_the_night(cases: list[Case], seconds: float) -> list[Case]:
    """The longest cases, until the others take so many seconds; the quickest of a function's cases stays."""
    quickest: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: (case.seconds, case.node_id)):
        quickest.setdefault(case.function, case)
    left, moved = sum(case.seconds for case in cases), list[Case]()
    for case in sorted(cases, key=lambda case: (-case.seconds, case.node_id)):
        if left <= seconds:
            break
        # what a case pays for a launch that others read is paid by another of them, wherever it runs
        if quickest[case.function] != case and not _shares_setup(case):
            moved.append(case)
            left -= case.seconds
    return moved


def main() -> None:
    """Write the file and say what both tiers take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="how many times as long the run took as on quiet cores"
    )
    parser.add_argument("--keep", action="store_true", help="the run was of tier 1 alone: the list keeps its cases")
    parser.add_argument("--night", type=float, metavar="SECONDS", help="the run was of tier 2: what may be left of it")
    arguments = parser.parse_args()
    cases = cases_of(arguments.junit, arguments.scale)
    if arguments.night is not None:
        moved = of_the_night(cases, arguments.night)
        names = {case.node_id for case in moved} | set(NIGHT.read_text().split("\n"))
        NIGHT.write_text("".join(f"{node_id}\n" for node_id in sorted(names - {""})))
        print(f"{len(cases)} cases; to the night: {len(moved)}, {sum(case.seconds for case in moved):,.0f} s")
        return
    left_out = tier_2(cases)
    total, seconds = sum(case.seconds for case in cases), sum(case.seconds for case in left_out)
    names = {case.node_id for case in left_out} | (set(OUTPUT.read_text().split("\n")) if arguments.keep else set())
    OUTPUT.write_text("".join(f"{node_id}\n" for node_id in sorted(names - {""})))
    print(f"{len(cases)} cases, {total:,.0f} s; tier 2 alone: {len(left_out)} cases, {seconds:,.0f} s")
    print(f"tier 1: {len(cases) - len(left_out)} cases, {total - seconds:,.0f} s of both workers together")


if __name__ == "__main__":
    main()
