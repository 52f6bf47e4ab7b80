"""Faults that a package's own tests did not notice, against every test of tier 1 that reaches their line.

Many of those run whole commands, with ranks, engines and workers in processes of their own, which see a fault only
where it is on disk: it stands in a copy of the tree, whose sources come first in the path of imports. Which test
reaches which line is noted once, without a fault, by coverage.py in every process.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import coverage

from mutation.recording.reach_plugin import DURATIONS, ONLY, plain

FOLDERS = ("kernels", "packages", "tests")
LEFT_OUT = ("tests/architecture", "tests/invariants/test_mutants.py")
"""Tests of texts, and those of this script."""
COPIED = ("benchmarks", "ci", "docs", "examples", "kernels", "packages", "tests")
"""Folders of the tree that tests read; the files beside them are copied too."""
NOT_COPIED = (".venv*", "__pycache__", "*.egg-info")
BUDGET = 120.0
"""A fault meets the quickest of the tests that reach it, up to this many seconds of them."""
LEAST_TIME, TIME_FACTOR = 60.0, 4.0
"""A run that takes longer than so many seconds and times its tests without a fault is ended, and counts as noticed."""
RECORDING = Path(__file__).parent / "recording"


@dataclass(frozen=True, slots=True)
class Reach:
    """Which tests reach which lines, and how long each takes."""

    tree: Path
    data: coverage.CoverageData
    seconds: dict[str, float]
    """Of every test that passes without a fault."""
    failing: list[str]

    def tests(self, module: Path, line: int) -> list[str]:
        """Return the tests that reach a line of a module, the quickest first, as many as `BUDGET` allows.

        A line that is run when the module is imported belongs to every test that reaches any line of the module.
        """
        contexts = self._contexts(module)
        names = set().union(*(contexts.get(number, set()) for number in self._statement(module, line)))
        if "" in names:
            names = set().union(*contexts.values())
        tests = sorted(self._expanded(names), key=lambda test: self.seconds[test])
        spent, kept = 0.0, list[str]()
        for test in tests:
            spent += self.seconds[test]
            if spent > BUDGET and kept:
                break
            kept.append(test)
        return kept

    def _contexts(self, module: Path) -> dict[int, set[str]]:
        found = self.data.contexts_by_lineno(str(self.tree / module))
        return {line: set(names) for line, names in found.items()}

    def _statement(self, module: Path, line: int) -> set[int]:
        """The line, and the first one of its statement: coverage.py may know the one or the other."""
        inner = [
            node.lineno
            for node in ast.walk(ast.parse((self.tree / module).read_bytes()))
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
        ]
        return {line, max(inner, default=line)}

    def _expanded(self, names: set[str]) -> set[str]:
        tests: set[str] = set()
        for name in names - {""}:
            test = plain(re.sub(r" \((setup|call|teardown)\)$", "", name))
            if name.endswith("::*"):  # a fixture that all tests below a place share
                tests |= self._below(name.removesuffix("::*"))
            elif name.endswith((" (setup)", " (teardown)")):  # a process of a fixture, perhaps one of the whole file
                tests |= self._below(test.partition("::")[0])
            else:
                tests.add(test)
        return tests & self.seconds.keys()

    def _below(self, place: str) -> set[str]:
        return {test for test in self.seconds if test.startswith(place)}


class WholeRuns:
    """A copy of the tree with the reach of its tests; `killer` plants one fault at a time in it."""

    def __init__(self, root: Path, folder: Path, processes: int) -> None:
        """Copy the tree at `root` to `folder`, and run the tests once without a fault, so many at a time.

        Where the folder holds a copy of the same sources already, that one is used. Tests that fail without a fault
        (for want of a repository, say) are left out, and named in `reach.failing`.
        """
        self._copy = folder / "tree"
        marks = folder / "durations.json"
        if not (marks.exists() and _sources(self._copy) == _sources(root)):
            shutil.rmtree(folder, ignore_errors=True)
            _copy(root, self._copy)
            _record(self._copy, folder, marks, processes)
        outcomes = json.loads(marks.read_text())
        data = coverage.CoverageData(str(folder / "reach.coverage"))
        data.read()
        self.reach = Reach(self._copy, data, outcomes["passed"], outcomes["failed"])

    def killer(self, module: Path, line: int, text: bytes) -> str | None:
        """Return the first test that fails while a module has this text ("timeout": none ended); None = all pass.

        Args:
            module: path below the root of the tree.
            line: where the fault is.
            text: the source with the fault.
        """
        tests = self.reach.tests(module, line)
        if not tests:
            return None
        file = self._copy / module
        before = file.read_bytes()
        file.write_bytes(text)
        try:
            return self._failure(tests)
        finally:
            file.write_bytes(before)

    def _failure(self, tests: list[str]) -> str | None:
        only = self._copy.parent / "only.txt"
        # a file's tests stay together, for the fixtures that they share
        first = {path: number for number, path in reversed(list(enumerate(test.partition("::")[0] for test in tests)))}
        ordered = sorted(tests, key=lambda test: first[test.partition("::")[0]])
        only.write_text("\n".join(ordered))
        limit = LEAST_TIME + TIME_FACTOR * sum(self.reach.seconds[test] for test in tests)
        words = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-x", "-n", "0", *_PLUGINS, *first]
        code, output = _run(words, self._copy, {ONLY: str(only)}, limit)
        if code is None:
            return "timeout"
        named = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return named[0] if named else None if code == 0 else f"pytest ended with {code}"


_PLUGINS = ("-p", "no:cacheprovider", "-p", "reach_plugin")


def _copy(root: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in root.iterdir():
        if path.is_file():
            shutil.copy(path, target / path.name)
        elif path.name in COPIED:
            shutil.copytree(path, target / path.name, ignore=shutil.ignore_patterns(*NOT_COPIED))


@cache
def _sources(folder: Path) -> dict[str, bytes]:
    paths = [path for top in FOLDERS for path in sorted((folder / top).rglob("*.py")) if ".venv" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _record(tree: Path, folder: Path, marks: Path, processes: int) -> None:
    """Run the tests in the tree without a fault, and note the lines that each reaches."""
    settings = folder / "coveragerc"
    lines = ["[run]", "parallel = true", f"data_file = {folder / 'reach.coverage'}", f"source = {tree / 'packages'}"]
    # ranks and workers are often ended by a signal
    settings.write_text("\n".join([*lines, "concurrency = thread", "sigterm = true", "patch = fork"]) + "\n")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "-n",
        str(processes),
        "--dist",
        "loadgroup",
        "--timeout",
        "150",
    ]
    words += [*_PLUGINS, *(f"--ignore={path}" for path in LEFT_OUT), *FOLDERS]
    more = {"COVERAGE_PROCESS_START": str(settings), DURATIONS: str(marks)}
    code, output = _run(words, tree, more, 7200)
    if code not in (0, 1):  # 1: some fail without a fault
        marks.unlink(missing_ok=True)
        raise RuntimeError(f"the tests did not run without a fault (pytest ended with {code}):\n{output[-3000:]}")
    whole = coverage.Coverage(config_file=str(settings))
    whole.combine()
    whole.save()


def _run(words: list[str], tree: Path, more: dict[str, str], limit: float) -> tuple[int | None, str]:
    """The exit code (None: ended by the clock) and the output of a program whose imports come from the tree."""
    sources = [*sorted((tree / "packages").glob("*/src")), tree / "kernels" / "src", RECORDING]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {
        "PYTHONPATH": os.pathsep.join(map(str, sources)),
        # a changed file of the same second and size would be taken for the compiled one
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    process = subprocess.Popen(
        words,
        cwd=tree,
        env=environment | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        # ranks and servers that a failed test left behind would take the time of the next
        _end_group(process.pid)
        process.wait()
    return process.returncode, output


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it may have ended
        os.killpg(pid, signal.SIGKILL)
