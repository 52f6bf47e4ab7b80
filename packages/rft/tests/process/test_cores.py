"""Cores that may be used: the affinity of the process, and the quota of its control group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rft.process import cores as cores_module
from rft.process.cores import usable_cores


@pytest.mark.parametrize(
    ("cores", "quota", "usable"),
    [
        (8, "max 100000\n", 8),
        (8, "300000 100000\n", 3),
        (8, "250000 100000\n", 3),
        (2, "900000 100000\n", 2),
        (4, "10000 100000\n", 1),
        (4, "", 4),
    ],
)
def test_the_usable_cores_are_those_of_affinity_and_quota(
    cores: int, quota: str, usable: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    monkeypatch.setattr(cores_module, "_QUOTA", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    assert usable_cores() == usable


def test_cores_are_counted_where_there_is_no_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores_module, "_QUOTA", tmp_path / "none")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for counted, usable in ((5, 5), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda counted=counted: counted)
        assert usable_cores() == usable


def test_a_gpu_may_be_there_where_its_driver_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores_module, "_GPU_DRIVERS", (tmp_path / "a", tmp_path / "b"))
    assert not cores_module.may_have_gpu()
    (tmp_path / "b").touch()
    assert cores_module.may_have_gpu()
