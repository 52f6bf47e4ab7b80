"""A process group of one, on doubles of torch's functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from rft_dist.launch import single_process
from rft_dist.launch.single_process import init_single_process_group, is_single_process_group


class Group:
    """In the place of torch.distributed: a group of this size, or none for 0."""

    def __init__(self, size: int = 0) -> None:
        self.size, self.made, self.left = size, list[tuple[Any, ...]](), 0

    def is_initialized(self) -> bool:
        return self.size > 0

    def get_world_size(self) -> int:
        assert self.size
        return self.size

    def init_process_group(self, backend: str, *, store: Any, **options: Any) -> None:
        self.made.append((backend, type(store), options))
        self.size = options["world_size"]

    def destroy_process_group(self) -> None:
        self.left += 1
        self.size = 0


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:0", "nccl")])
def test_the_group_is_made_once_and_left_when_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    group, at_exit = Group(), list[Any]()
    monkeypatch.setattr(single_process, "dist", group)
    monkeypatch.setattr(single_process, "atexit", SimpleNamespace(register=at_exit.append))
    for _ in range(2):
        init_single_process_group(torch.device(device))
    assert group.made == [(backend, HashStore, {"rank": 0, "world_size": 1, "group_name": "rft_alone"})]
    [leave] = at_exit
    for _ in range(2):
        leave()
    assert group.left == 1
    group.size = 2
    leave()
    assert group.left == 1, "a group of several ranks is left by those who made it"


@pytest.mark.parametrize(("size", "single"), [(0, False), (1, True), (2, False)])
def test_a_group_is_a_single_one_by_its_size(monkeypatch: pytest.MonkeyPatch, size: int, single: bool) -> None:
    monkeypatch.setattr(single_process, "dist", Group(size))
    assert is_single_process_group() is single
