"""What every test run shares: one torch thread a process, and tests whose needs are absent deselected and counted."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before torch is imported: two threads in each of two processes are far slower
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "RFT_CACHE" not in os.environ:
    # models and rows that runs make belong to the tests, and not to whoever starts them
    os.environ["RFT_CACHE"] = _cache = tempfile.mkdtemp(prefix="rft-tests-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)

import pytest  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from support.durable_disk import DurableDisk
    from support.power_loss import PowerLoss

ROOT = Path(__file__).parent
CASES_OF_TIERS = {"full": ROOT / "tests" / "tier2_cases.txt", "night": ROOT / "tests" / "night_cases.txt"}
"""Files of node ids by the marker that these cases get; `ci/split_tiers.py` writes them from durations."""
WORKSPACE_TOOL = "importlinter"
"""Installed in the workspace's own environment alone: without it only packages are tested, not what crosses them."""


def _package_of(path: Path) -> str | None:
    """The package that must be installed for the tests below `path`."""
    parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ()
    if len(parts) >= 2 and parts[0] == "packages":
        return parts[1].replace("-", "_")
    if parts and parts[0] == "kernels":
        return "rft_kernels"
    if parts and parts[0] == "tests":
        return WORKSPACE_TOOL
    return None


def _absent(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """In an environment that holds one package alone, collect that package's tests alone."""
    package = _package_of(collection_path)
    return True if package is not None and _absent(package) else None


def pytest_report_header() -> list[str]:
    """Say what is left out for want of a package, so that nothing is green by being absent."""
    names = [path.name.replace("-", "_") for path in sorted((ROOT / "packages").iterdir())] + ["rft_kernels"]
    missing = [name for name in names if _absent(name)]
    names = [*missing, *(["tests/ (what crosses packages)"] if _absent(WORKSPACE_TOOL) else [])]
    return [f"not installed here, tests not collected: {', '.join(names)}"] if names else []


def _num_gpus() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _leaves_packages_out() -> bool:
    return any(_absent(path.name.replace("-", "_")) for path in (ROOT / "packages").iterdir()) or _absent(
        WORKSPACE_TOOL
    )


def _mark_cases(config: pytest.Config, items: list[pytest.Item], file: Path, marker: str) -> None:
    """Give the cases that a file names a marker."""
    names = set(file.read_text().splitlines())
    for item in items:
        name = item.nodeid.rpartition("@")[0] if "@" in item.nodeid.rpartition("]")[2] else item.nodeid
        if name in names:
            item.add_marker(marker)
            names.discard(name)
    # Only a run of everything can say that a name is stale; workers of xdist get the same arguments.
    if names and config.args == config.getini("testpaths") and not _leaves_packages_out():
        raise pytest.UsageError(f"{file.name} names {len(names)} cases that are no tests: {sorted(names)[:5]}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect (and so count) what this machine or this command has no means for."""
    for marker, file in CASES_OF_TIERS.items():
        _mark_cases(config, items, file, marker)
    chosen = config.getoption("-m") or ""
    gpus = _num_gpus()
    if "gpu" in str(chosen) and "not gpu" not in str(chosen) and gpus == 0:
        raise pytest.UsageError("-m gpu was asked for and no CUDA device is visible: nothing would be tested")
    reasons = {
        "gpu": gpus < 1,
        "multigpu": gpus < 2,
        "system": "system" not in str(chosen),
        "full": "full" not in str(chosen),
        "night": "night" not in str(chosen),
        "data": not os.environ.get("RFT_DATA_DIR"),
    }
    # a case that the night runs is in no other tier, whatever else it was chosen for
    left_out = [
        item
        for item in items
        if any(
            off and item.get_closest_marker(name) and not (name == "full" and item.get_closest_marker("night"))
            for name, off in reasons.items()
        )
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    # What crosses packages takes longest: begun last, one worker would wait for the other at the end.
    items.sort(key=lambda item: not item.path.is_relative_to(ROOT / "tests"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Leave the library's logger as it was: a command run in this process shows notices by a handler of its own."""
    logger = logging.getLogger("rft")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    try:
        return (yield)
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Where the public data sets are; a path that is set and missing is a failure, not a reason to pass."""
    path = Path(os.environ["RFT_DATA_DIR"]).resolve()
    assert path.is_dir(), f"RFT_DATA_DIR={path} is set and is not a directory"
    return path


@pytest.fixture
def durable_disk(monkeypatch: pytest.MonkeyPatch) -> DurableDisk:
    """What the disk would hold after a power loss, of all that this process writes from now on."""
    sys.path.insert(0, str(ROOT / "tests"))  # the package `support`, whichever package is tested
    from support.durable_disk import DurableDisk

    disk = DurableDisk()
    disk.install(monkeypatch)
    return disk


@pytest.fixture
def power_loss_below(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], PowerLoss]:
    """Begin to look on at what this process does below a directory: all that a power loss may leave of it."""
    sys.path.insert(0, str(ROOT / "tests"))  # the package `support`, whichever package is tested
    from support.power_loss import PowerLoss

    def begin(root: Path) -> PowerLoss:
        found = PowerLoss(root)
        found.install(monkeypatch)
        return found

    return begin
