"""Tiny runs for the tests that cross packages: a server that forks them, and a task for them to learn."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the package `support` beside this file

from support.references import References
from support.runs import ForkServer
from support.setup import TinyTask, make_task


@pytest.fixture(scope="session")
def memory_root() -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of saves wait for no disk."""
    shared = Path("/dev/shm")
    where = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="rft-tests-", dir=where))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def server(memory_root: Path) -> Iterator[ForkServer]:
    """Forks runs from a process that has everything imported."""
    folder = memory_root / "server"
    folder.mkdir()
    server = ForkServer(folder)
    yield server
    server.close()


@pytest.fixture(scope="session")
def task(memory_root: Path, server: ForkServer) -> TinyTask:
    """Sums of two small digits, and a model that knows some of them."""
    return make_task(memory_root / "task", server)


@pytest.fixture
def runs(memory_root: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder in memory for the runs of one test."""
    folder = Path(tempfile.mkdtemp(prefix="test-", dir=memory_root))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def references(memory_root: Path, server: ForkServer, task: TinyTask) -> References:
    """Uninterrupted runs, one a variant."""
    return References(server, task, memory_root)
