"""Runs tests against a mutant: a forked child that has torch, pytest and hypothesis imported already.

The child puts the mutated module in place of the real one before anything imports its package, and
runs the tests in its own process until one fails. Nothing is written to the tree.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

import pytest
from hypothesis import Phase, settings

from mutation import tree

MEMORY = 4 << 30
"""Bytes that a child may take beyond what the parent has: a mutated size must not fill the machine."""
OPTIONS = ("-q", "-c", os.devnull, "--import-mode=importlib", "--tb=no", "--assert=plain")
WITHOUT = ("cacheprovider", "warnings", "junitxml", "doctest", "unraisableexception", "threadexception")
"""Plugins that tell nothing here; the last two collect all garbage when they end, which takes longer than the tests."""


PATIENCE, CLOCK = 30, 90
"""Outside of the equations a test is given up, without a mutant too, after so many seconds of processor time, and after
so many by the clock: it may wait for ever. A busy machine stretches the second alone."""


class TooSlow(BaseException):
    """A test took longer than `PATIENCE` or `CLOCK`; no test catches it."""


@dataclass(frozen=True, slots=True)
class Change:
    """A module of the package and the source that stands in for it."""

    module: str
    path: Path
    source: bytes


@dataclass(frozen=True, slots=True)
class Report:
    """What the tests said."""

    passed: bool
    failure: str = ""
    """The first test that failed, or what else ended the run."""
    seconds: float = 0.0
    durations: dict[str, float] = field(default_factory=dict)
    """Seconds of each test that passed."""
    failures: list[str] = field(default_factory=list)
    """Every test that failed."""
    modules: list[str] = field(default_factory=list)
    """Modules of others that were imported by the end."""


@dataclass(frozen=True, slots=True)
class Job:
    """Test files to run against a change, in order; None for the code as it is."""

    change: Change | None
    files: Sequence[Path]
    limit: int
    """Seconds of processor time, so that a busy machine ends nothing; sixteen times as much by the clock."""
    first: dict[str, float] = field(default_factory=dict)
    """Seconds that each test takes: the quick ones go first, and those that are not here are left out."""


class _Stand(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds and loads one module, from a text in place of its file."""

    def __init__(self, change: Change) -> None:
        super().__init__(f"{tree.import_name()}.{change.module}", str(change.path))
        self.change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.change.source, str(self.change.path), "exec")


class _Watch:
    """Sees the first failure and how long tests take; makes hypothesis stop at the first example that fails."""

    def __init__(self, first: dict[str, float]) -> None:
        self.first = first
        self.items: list[pytest.Item] = []
        self.setting_up: list[str] = []
        self.launching: set[str] = set()
        """Tests and fixtures that run a program of the tests in a process of its own, which does not see a fault."""
        self.failures: list[str] = []
        self.durations: dict[str, float] = {}

    def pytest_collection(self, session: pytest.Session) -> None:
        settings.register_profile("mutants", settings.default, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = items
        if self.first:
            items[:] = sorted((item for item in items if item.nodeid in self.first), key=lambda i: self.first[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if not tree.is_wider():
            return (yield)
        limits = ((signal.SIGPROF, signal.ITIMER_PROF, PATIENCE), (signal.SIGALRM, signal.ITIMER_REAL, CLOCK))
        for number, timer, seconds in limits:
            signal.signal(number, _give_up)
            # again and again: what takes a test long may catch the first, or hold the fixtures of a whole file
            signal.setitimer(timer, seconds, seconds)
        try:
            return (yield)
        finally:
            for _, timer, _ in limits:
                signal.setitimer(timer, 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        self.setting_up.append(f"{fixturedef.baseid}::{fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.setting_up.pop()

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Note who starts a Python program that lies below the tests."""
        if event != "subprocess.Popen" or not isinstance(arguments[1], list | tuple):
            return
        words = [str(word) for word in arguments[1]]
        if words[:1] == [sys.executable] and words[1:2] and words[1].startswith(str(tree.ROOT)):
            self.launching.add(self.setting_up[-1] if self.setting_up else os.environ["PYTEST_CURRENT_TEST"].split()[0])

    def outside(self) -> set[str]:
        """The tests whose work such a program does."""
        found = {name for name in self.launching if "::test_" in name}
        for item in self.items:
            info: Any = getattr(item, "_fixtureinfo", None)
            used = info.name2fixturedefs.values() if info else ()
            if any(f"{each.baseid}::{each.argname}" in self.launching for each in (d for ds in used for d in ds)):
                found.add(item.nodeid)
        return found

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append(f"import by {report.nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] = self.durations.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failures.append(report.nodeid)


def _give_up(number: int, frame: object) -> None:
    raise TooSlow


def _in_child(job: Job) -> Report:
    own = tree.import_name()
    assert not any(name.partition(".")[0] == own for name in sys.modules), "the parent must not import it"
    if job.change is not None:
        sys.meta_path.insert(0, _Stand(job.change))
    watch, begin = _Watch(job.first), time.monotonic()
    if job.change is None and tree.is_wider():
        sys.addaudithook(watch.audit)
    stop = () if job.change is None else ("-x",)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = [word for name in WITHOUT for word in ("-p", f"no:{name}")]
    code = pytest.main([*OPTIONS, *plugins, "--rootdir", str(tree.ROOT), *stop, *map(str, job.files)], plugins=[watch])
    failure = watch.failures[0] if watch.failures else "" if code == 0 else f"pytest ended with {int(code)}"
    seconds = time.monotonic() - begin
    if job.change is not None:
        return Report(code == 0, failure, seconds)
    foreign = [name for name in sys.modules if name.partition(".")[0] not in (own, "tests", "packages")]
    left_out = {*watch.failures, *watch.outside()}
    passed = {name: duration for name, duration in watch.durations.items() if name not in left_out}
    return Report(code == 0, failure, seconds, passed, watch.failures, foreign)


def _child(job: Job, pipe: int) -> None:
    """Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        gc.disable()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (job.limit, job.limit + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        report = json.dumps(asdict(_in_child(job))).encode()
        while report:
            report = report[os.write(pipe, report) :]
        code = 0
    finally:
        os._exit(code)


@dataclass(slots=True)
class _Running:
    process: int
    pipe: int
    deadline: float
    begin: float
    done: Callable[[Report], Job | None]
    text: bytes = b""


def prepare(scratch: Path) -> None:
    """A copy of the selected package, which children import; compiled files are kept beside it, outside the tree.

    Args:
        scratch: an empty folder, kept until the run is over.
    """
    tree.snapshot(scratch / "tree")
    sys.path.insert(0, str(tree.PACKAGE / "src"))
    sys.pycache_prefix = str(scratch / "compiled")
    sys.dont_write_bytecode = False


def run_all(jobs: Iterator[tuple[Job, Callable[[Report], Job | None]]], processes: int) -> None:
    """Run jobs in children, at most so many at once.

    Args:
        jobs: each with what takes its report, which may give a job to run next.
        processes: children at once.
    """
    running: dict[int, _Running] = {}
    more = True
    try:
        while running or more:
            while more and len(running) < processes:
                following = next(jobs, None)
                more = following is not None
                if following is not None:
                    _start(*following, running)
            for child in _finished(running):
                del running[child.pipe]
                again = child.done(_report(child))
                if again is not None:
                    _start(again, child.done, running)
    finally:
        for child in running.values():
            _kill(child)


def _start(job: Job, done: Callable[[Report], Job | None], running: dict[int, _Running]) -> None:
    reading, writing = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.close(reading)
        _child(job, writing)
    os.close(writing)
    now = time.monotonic()
    running[reading] = _Running(process, reading, now + 16 * job.limit, now, done)


def _finished(running: dict[int, _Running]) -> list[_Running]:
    """Waits until a child has said all or ran too long."""
    if not running:
        return []
    patience = max(0.0, min(child.deadline for child in running.values()) - time.monotonic())
    ready: list[int] = select.select(list(running), [], [], patience)[0]
    over: list[_Running] = []
    for pipe in ready:
        part = os.read(pipe, 1 << 16)
        running[pipe].text += part
        if not part:
            over.append(running[pipe])
    now = time.monotonic()
    return over + [child for child in running.values() if child not in over and now >= child.deadline]


def _report(child: _Running) -> Report:
    seconds = time.monotonic() - child.begin
    if time.monotonic() >= child.deadline:
        _kill(child)
        return Report(False, "timeout", seconds)
    os.close(child.pipe)
    status = os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])
    if -status in (signal.SIGXCPU, signal.SIGKILL):
        return Report(False, "timeout", seconds)
    if not child.text:
        return Report(False, f"the process ended with {status}", seconds)
    return Report(**cast(dict[str, Any], json.loads(child.text)))


def _kill(child: _Running) -> None:
    for kill, target in ((os.killpg, child.process), (os.kill, child.process)):
        try:
            kill(target, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.close(child.pipe)
    os.waitpid(child.process, 0)
