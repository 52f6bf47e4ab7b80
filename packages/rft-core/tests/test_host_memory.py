"""Memory of the host, from files as Linux writes them."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from rft_core.host_memory import free_host_memory, resident_memory, total_host_memory


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 4000 * 1024),
        (
            MEMINFO
            | {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "900000\n"}
            | {
                "sys/fs/cgroup/a/memory.current": "500000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 7\n",
            },
            400007,
        ),
        (
            MEMINFO
            | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}
            | {"sys/fs/cgroup/memory.current": "5\n"},
            4000 * 1024,
        ),
        (
            MEMINFO
            | {"proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "800\n"}
            | {"sys/fs/cgroup/memory/x/memory.usage_in_bytes": "300\n"},
            500,
        ),
        (
            MEMINFO
            | {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "10\n",
                "sys/fs/cgroup/memory.current": "99\n",
            },
            0,
        ),
    ],
)
def test_what_the_system_and_the_control_groups_leave(tmp_path: Path, files: dict[str, str], expected: int | None):
    assert free_host_memory(write(tmp_path, files)) == expected


def test_this_machine_tells():
    free = free_host_memory()
    assert free is None or 2**20 < free < 2**50


def group(folder: str, names: tuple[str, str], limit: str, used: str, stat: str | None = None) -> dict[str, str]:
    files = {f"{folder}/{names[0]}": limit, f"{folder}/{names[1]}": used}
    return files if stat is None else files | {f"{folder}/memory.stat": stat}


ONE, TWO = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("lines", "files", "free"),
    [
        ("4:cpu,memory:/x\n", group(f"{V1}/x", ONE, "800", "300", "cache 5\ntotal_inactive_file 40\n"), 540),
        ("4:memory:/x\n", group(f"{V1}/x", ONE, "800", "300", "inactive_file 40\n"), 500),
        ("4:cpu:/x\n", group(f"{V1}/x", ONE, "800", "300"), None),
        ("4:memory:/x/y\n", group(f"{V1}", ONE, "800", "300"), 500),
        ("0::/a:b\n", group(f"{V2}/a:b", TWO, "800", "300", "inactive_file 40\nfile 9\n"), 540),
        ("0::/a\n", group(f"{V2}/a", TWO, "max\n", "300") | group(V2, TWO, "700\n", "300\n"), 400),
        ("0::/a\n", group(f"{V2}/a", TWO, "800", "300") | group(V2, TWO, "700", "300"), 400),
        ("0::/a\n", group(f"{V2}/a", TWO, "800", "900"), 0),
        ("0::/a\n", {f"{V2}/a/memory.max": "800"}, None),
        ("0::/a\n", {f"{V2}/a/memory.current": "800"}, None),
        ("0::/a\n", group(f"{V2}/a", TWO, "", "300"), None),
    ],
)
def test_the_room_of_a_control_group(tmp_path: Path, lines: str, files: dict[str, str], free: int | None) -> None:
    for name, text in (files | {"proc/self/cgroup": lines}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_host_memory(tmp_path) == free
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 3 kB\nSwap: 1 kB\n")
    assert free_host_memory(tmp_path) == (3072 if free is None else free)


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/a\n", {f"{V2}/a/memory.max": "max\n", f"{V2}/memory.max": "1048576\n"}, 2**20),
        ("4:memory:/x\n", {f"{V1}/x/memory.limit_in_bytes": "4096"}, 4096),
        ("0::/a\n", {f"{V2}/a/memory.max": f"{2**60}"}, None),
        ("0::/a\n", {f"{V2}/b/memory.max": "4096"}, None),
        ("", {}, None),
    ],
)
def test_the_memory_of_this_machine_or_the_limit_of_its_group(
    tmp_path: Path, lines: str, files: dict[str, str], limit: int | None
) -> None:
    found = total_host_memory(write(tmp_path, files | {"proc/self/cgroup": lines}))
    assert found == (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if limit is None else limit)


def test_the_resident_memory_of_this_process_grows_with_what_it_touches() -> None:
    before = resident_memory()
    # mapped anew: memory of the allocator may be there from before
    with mmap.mmap(-1, 64 * 2**20) as mapped:
        kept = torch.frombuffer(mapped, dtype=torch.uint8).fill_(1)
        after = resident_memory()
        last = int(kept[-1])
        del kept
    assert before
    assert after
    assert after - before >= 32 * 2**20
    assert last == 1
