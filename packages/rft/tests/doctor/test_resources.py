"""Findings on disks, memory and limits."""

from pathlib import Path

import pytest

from rft.doctor.resources import Volume, disks, limits, memory, memory_here, volumes_here

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "writable", "verdict"),
    [(100 * GIB, True, "ok"), (5 * GIB, True, "note"), (GIB // 2, True, "problem"), (100 * GIB, False, "problem")],
)
def test_a_disk_is_judged_by_its_space_and_by_being_writable(free: int, writable: bool, verdict: str) -> None:
    (finding,) = disks([Volume("runs", "/data/runs", free, writable)])
    assert finding.verdict == verdict
    assert "/data/runs" in finding.value


def test_a_directory_that_is_not_there_yet_is_judged_by_the_one_that_will_hold_it(tmp_path: Path) -> None:
    runs, models, _ = volumes_here(str(tmp_path / "a" / "b"), {"HF_HOME": str(tmp_path)})
    assert runs.writable
    # other programs write to the disk between the two looks
    assert abs(runs.free - models.free) < GIB
    assert runs.free > 0
    assert not (tmp_path / "a").exists()


def test_little_memory_is_noted() -> None:
    assert [f.verdict for f in memory(16 * GIB, 32 * GIB, 8 * GIB)] == ["ok", "ok"]
    assert [f.verdict for f in memory(2 * GIB, 32 * GIB, 64 << 20)] == ["note", "note"]
    available, total, shared = memory_here()
    assert 0 < available <= total
    assert shared >= 0


@pytest.mark.parametrize(
    ("files", "threads", "verdicts"),
    [
        (65536, None, ["ok", "ok"]),
        (1024, None, ["note", "ok"]),
        (65536, "2", ["ok", "ok"]),
        (65536, "8", ["ok", "ok", "note"]),
        (65536, "many", ["ok", "ok"]),
    ],
)
def test_limits_are_judged(files: int, threads: str | None, verdicts: list[str]) -> None:
    assert [f.verdict for f in limits(files, 2, threads)] == verdicts
