"""Plugin of pytest: notes which test reaches which lines and how long it takes, or runs the tests of a list alone."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

DURATIONS, ONLY = "RFT_REACH_DURATIONS", "RFT_REACH_ONLY"
"""Variables of the environment: the file of seconds by test, to write; the file of the tests to run, in order."""


def plain(nodeid: str) -> str:
    """The name of a test without the group that pytest-xdist appends."""
    return nodeid.rpartition("@")[0] if "@" in nodeid.rpartition("]")[2] else nodeid


_contexts = [""]
"""What is running, the innermost last: nothing, a test, shared fixtures of it."""


@contextlib.contextmanager
def _within(context: str) -> Generator[None]:
    current = coverage.Coverage.current()
    _contexts.append(context)
    if current is not None:
        current.switch_context(context)
    try:
        yield
    finally:
        _contexts.pop()
        if current is not None:
            current.switch_context(_contexts[-1])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Lines reached from here on are those of this test."""
    with _within(plain(item.nodeid)):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """Lines of a fixture that several tests share are those of every test below its place."""
    if fixturedef.scope == "function":
        return (yield)
    with _within(f"{fixturedef.baseid}::*"):
        return (yield)


class _Durations:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = plain(report.nodeid)
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.outcome != "passed":
            self.failed.add(name)

    def pytest_sessionfinish(self) -> None:
        passed = {name: seconds for name, seconds in self.seconds.items() if name not in self.failed}
        self.file.write_text(json.dumps({"passed": passed, "failed": sorted(self.failed)}))


def pytest_configure(config: pytest.Config) -> None:
    """Count seconds where all reports arrive: in the process that gives out the tests."""
    if DURATIONS in os.environ and not hasattr(config, "workerinput"):
        # taken out: a test may run pytest itself
        config.pluginmanager.register(_Durations(Path(os.environ.pop(DURATIONS))))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the listed tests, in the order of the list."""
    if ONLY in os.environ:
        place = {name: number for number, name in enumerate(Path(os.environ[ONLY]).read_text().splitlines())}
        items[:] = sorted(
            (item for item in items if plain(item.nodeid) in place), key=lambda item: place[plain(item.nodeid)]
        )
