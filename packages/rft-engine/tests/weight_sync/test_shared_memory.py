"""Weight snapshots in files: where they are put, and what earlier processes have left."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rft_engine.weight_sync import weight_file
from rft_engine.weight_sync.shared_memory import SharedWeightStore

NUM = 1000
NUM_BYTES = 4 * NUM
RESERVE = 2**26
"""Bytes of shared memory that are left free."""


def provider() -> Iterator[tuple[str, Tensor]]:
    yield "w", torch.zeros(NUM)


@pytest.mark.parametrize("num_bytes", [NUM_BYTES, NUM_BYTES + 1])
def test_the_first_version_goes_where_there_is_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    memory = Path("/dev/shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(weight_file.os, "access", lambda path, mode: True)
    # room for twice the weights, but not for one byte more
    free = 2 * NUM_BYTES + RESERVE + 1
    monkeypatch.setattr(weight_file.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    store = SharedWeightStore(provider, torch.float32, num_bytes=num_bytes)
    try:
        assert store.put(1).path.parent.parent == (memory if num_bytes == NUM_BYTES else tmp_path)
        assert store.put(2).path.parent.parent == memory, "by what was written"
    finally:
        store.close()
