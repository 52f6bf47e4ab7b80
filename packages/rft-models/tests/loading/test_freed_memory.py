"""Freed host memory stays with the process, unless the environment sets the allocator up."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from rft_models.loading.freed_memory import keep_freed_memory

NAMES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "LD_PRELOAD")

PAGES = """
import ctypes, importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("freed_memory", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
kept = module.keep_freed_memory() if sys.argv[2] == "keep" else None
def allocate():
    blocks = [bytearray(2**20) for _ in range(40)]
allocate(); allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    allocate()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> tuple[str, int]:
    """What `keep_freed_memory` said, and the faults of four times 40 MiB, in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name not in NAMES}
    path = sys.modules[keep_freed_memory.__module__].__file__
    assert path is not None
    command = [sys.executable, "-I", "-c", PAGES, path, mode]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return kept, int(faults)


def test_freed_memory_is_used_again_without_page_faults() -> None:
    kept, faults = page_faults("keep")
    assert kept == str(platform.libc_ver()[0] == "glibc")
    # 40 MiB are 10,240 pages of 4 KiB; without it each of the four rounds takes them anew
    assert kept == "False" or faults < 1000 < page_faults("leave")[1]


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"])
def test_the_environment_has_the_last_word(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "131072")
    assert not keep_freed_memory.__wrapped__()


def test_tunables_of_glibc_have_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")
    assert not keep_freed_memory.__wrapped__()
