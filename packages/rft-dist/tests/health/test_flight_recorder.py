"""Torch's own records of collectives, on doubles of what torch has."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_dist.health import flight_recorder
from rft_dist.health.flight_recorder import FLIGHT_RECORDER, abort_groups, library_calls, record_flights


@pytest.fixture
def torch_dist(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In the place of torch.distributed: initialized, over NCCL."""
    double = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_backend=lambda: "nccl", _C=SimpleNamespace()
    )
    monkeypatch.setattr(flight_recorder, "dist", double)
    return double


def test_the_recorder_is_switched_on_unless_its_length_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = FLIGHT_RECORDER
    for name in FLIGHT_RECORDER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(first, "7")
    record_flights()
    assert os.environ[first] == "7"
    assert [os.environ[name] for name in others] == ["2000"]
    for name in others:
        monkeypatch.delenv(name)


def test_collectives_of_all_groups_are_added_and_groups_that_count_nothing_left_out(
    torch_dist: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        def __init__(self, number: int | None) -> None:
            self.number = number

        def _get_sequence_number_for_group(self) -> int:
            if self.number is None:
                raise RuntimeError("not supported")
            return self.number

    groups = {Group(3): 1, Group(None): 2, object(): 3, Group(4): 4}
    monkeypatch.setattr(flight_recorder, "distributed_c10d", SimpleNamespace(_world=SimpleNamespace(pg_map=groups)))
    assert library_calls() == 7
    torch_dist.is_initialized = lambda: False
    assert library_calls() == 0
    torch_dist.is_available, torch_dist.is_initialized = lambda: False, lambda: True
    assert library_calls() == 0
    torch_dist.is_available = lambda: True
    monkeypatch.setattr(flight_recorder, "distributed_c10d", SimpleNamespace(_world=SimpleNamespace()))
    assert library_calls() == 0


@pytest.mark.parametrize("text", ["{}", b"{}"])
def test_the_last_collectives_are_written_and_the_groups_let_go(
    torch_dist: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Any
) -> None:
    aborted: list[int] = []
    abort = SimpleNamespace(_abort_process_group=lambda: aborted.append(1))
    monkeypatch.setattr(flight_recorder, "distributed_c10d", abort)
    torch_dist._C = SimpleNamespace(_dump_nccl_trace_json=lambda: text)
    abort_groups(tmp_path, 3)
    assert aborted == [1], "a folder without logs is no reason to hold on"
    (tmp_path / "logs").mkdir()
    abort_groups(tmp_path, 3)
    assert (tmp_path / "logs" / "nccl_rank_3.json").read_bytes() == b"{}"
    abort_groups(None, 3)
    torch_dist._C = SimpleNamespace()
    abort_groups(tmp_path, 4)
    assert aborted == [1] * 4
    assert [file.name for file in (tmp_path / "logs").iterdir()] == ["nccl_rank_3.json"]


def test_other_backends_and_no_group_at_all_are_left_alone(
    torch_dist: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    aborted: list[int] = []
    monkeypatch.setattr(
        flight_recorder, "distributed_c10d", SimpleNamespace(_abort_process_group=lambda: aborted.append(1))
    )
    torch_dist.get_backend = lambda: "gloo"
    abort_groups(tmp_path, 0)
    torch_dist.get_backend, torch_dist.is_initialized = lambda: "nccl", lambda: False
    abort_groups(tmp_path, 0)
    assert aborted == []
    monkeypatch.setattr(flight_recorder, "distributed_c10d", SimpleNamespace())
    torch_dist.is_initialized = lambda: True
    abort_groups(None, 0)


def test_where_torch_distributed_has_no_records_those_of_torch_are_asked(
    torch_dist: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    torch_dist._C = None
    monkeypatch.setattr(flight_recorder, "_c10d", lambda: SimpleNamespace(_dump_nccl_trace_json=lambda: "x"))
    flight_recorder._write_flights(tmp_path, 1)
    assert (tmp_path / "logs" / "nccl_rank_1.json").read_text() == "x"


def test_groups_are_let_go_by_a_thread_that_is_waited_for_a_moment(
    torch_dist: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    class Thread:
        def __init__(self, **options: object) -> None:
            done.append(options)

        def start(self) -> None:
            done.append("start")

        def join(self, timeout: float) -> None:
            done.append(("join", timeout))

    monkeypatch.setattr(flight_recorder, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(flight_recorder, "distributed_c10d", SimpleNamespace(_abort_process_group=done.clear))
    abort_groups(None, 0)
    assert done == [{"target": done.clear, "daemon": True}, "start", ("join", 2.0)]
