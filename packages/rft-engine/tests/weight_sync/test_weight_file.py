"""Tensors in a file: written straight, mapped, and no more room taken than there is."""

from __future__ import annotations

import errno
import json
import os
import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rft_core.errors import StorageError
from rft_engine.testing.replica_worker import FakeMedia
from rft_engine.weight_sync import weight_file
from rft_engine.weight_sync.file_transport import FileTransport, torch_dtype
from rft_engine.weight_sync.shared_images import SharedImageStore
from rft_engine.weight_sync.shared_memory import SharedWeightStore
from rft_engine.weight_sync.weight_file import (
    read_header,
    read_weight_file,
    shared_directory,
    write_weight_file,
)

TENSORS = {
    "a": torch.arange(6.0).view(2, 3).T,
    "b": torch.tensor([True, False, True]),
    "c": torch.arange(5000.0),
    "d": torch.zeros(0, 4),
    "e": torch.tensor(7, dtype=torch.int64),
    "f": torch.arange(3.0).to(torch.bfloat16).requires_grad_(),
    "g": torch.zeros(3, 0, dtype=torch.int16),
}


def same(found: dict[str, Tensor]) -> bool:
    equal = (torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    return list(found) == list(TENSORS) and all(equal)


def test_tensors_come_back_also_when_the_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    assert write_weight_file(path, TENSORS.items()) == 24 + 3 + 20_000 + 8 + 6
    found = read_weight_file(path)
    found["c"][0] = 5.0
    assert read_weight_file(path)["c"][0] == 0.0, "what is read is a copy when it is written"
    found["c"][0] = 0.0
    path.unlink()
    assert same(found)


def test_the_library_reads_the_file_and_its_files_are_read(tmp_path: Path) -> None:
    write_weight_file(tmp_path / "a", TENSORS.items())
    assert same({name: load_file(tmp_path / "a")[name] for name in TENSORS})
    given = {name: tensor.detach().contiguous() for name, tensor in TENSORS.items()}
    save_file(given, tmp_path / "b", metadata={"format": "pt"})
    found = read_weight_file(tmp_path / "b")
    assert same({name: found[name] for name in TENSORS})
    assert "__metadata__" not in read_header(tmp_path / "b")


@pytest.mark.parametrize(("expected", "room"), [(1, 2**16), (127, 2**16), (128, 2**16), (1000, 512_000)])
def test_room_for_the_header_is_for_as_many_tensors_as_are_expected(tmp_path: Path, expected: int, room: int) -> None:
    write_weight_file(tmp_path / "a", TENSORS.items(), expected)
    data = (tmp_path / "a").read_bytes()
    assert struct.unpack("<Q", data[:8]) == (room - 8,)
    assert len(data) == room + 20_041
    assert json.loads(data[8:room])["b"] == {"dtype": "BOOL", "shape": [3], "data_offsets": [24, 27]}
    with pytest.raises(AssertionError):
        write_weight_file(tmp_path / "b", ((f"{number:0400d}", torch.zeros(1)) for number in range(200)), 1)


def test_memory_that_is_full_is_an_error_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []

    def allocate(descriptor: int, start: int, size: int) -> None:
        taken.append((start, size))
        if len(taken) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.undo()
        weight_file.os.posix_fallocate(descriptor, start, size)
        monkeypatch.setattr(weight_file.os, "posix_fallocate", allocate)

    monkeypatch.setattr(weight_file.os, "posix_fallocate", allocate)
    with pytest.raises(StorageError) as caught:
        write_weight_file(tmp_path / "a", TENSORS.items())
    assert caught.value.problem.code == "engine.weights.no_room"
    assert "0 MiB" in caught.value.problem.what
    room = 512_000
    assert taken == [(room, 24), (room + 24, 3), (room + 27, 20_000)]


def test_a_file_whose_header_does_not_fit_its_tensors_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(AssertionError):
        read_weight_file(tmp_path / "a")


@pytest.mark.parametrize(("free", "shared"), [(2**26 + 101, True), (2**26 + 100, False)])
def test_shared_memory_is_taken_where_it_has_room(monkeypatch: pytest.MonkeyPatch, free: int, shared: bool) -> None:
    monkeypatch.setattr(weight_file.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(weight_file.os, "access", lambda path, mode: True)
    memory, other = Path("/dev/shm"), Path(tempfile.gettempdir())
    assert shared_directory(100).parent == (memory if shared else other)
    monkeypatch.setattr(weight_file.os, "access", lambda path, mode: False)
    assert shared_directory(100).parent == other


class Source:
    num_bytes, num_tensors = 50, 3

    def __init__(self) -> None:
        self.asked: list[torch.dtype] = []

    def tensors(self, dtype: torch.dtype) -> Any:
        self.asked.append(dtype)
        return iter(TENSORS.items())


def test_a_file_goes_to_the_workers_and_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room: list[int] = []
    monkeypatch.setattr(
        "rft_engine.weight_sync.file_transport.shared_directory", lambda size: (room.append(size), tmp_path)[1]
    )
    calls: list[Any] = []

    class Workers:
        def rpc(self, method: str, arguments: Any = (), seconds: float | None = None) -> list[Any]:
            [name] = arguments
            calls.append((method, seconds, same(read_weight_file(name)), Path(name).parent))
            if len(calls) == 2:
                raise RuntimeError("broken")
            return [{"a": "digest"}]

    source = Source()
    transport = FileTransport(source, Workers(), "bfloat16", 7.0)  # type: ignore[arg-type]
    assert transport.send() == [{"a": "digest"}]
    with pytest.raises(RuntimeError, match="broken"):
        transport.send()
    assert calls == [("rft_load_file", 7.0, True, tmp_path)] * 2
    assert list(tmp_path.iterdir()) == []
    assert source.asked == [torch.bfloat16] * 2
    assert room == [100, 100], "twice the weights: the file, and what else is written meanwhile"
    with pytest.raises(AssertionError):
        torch_dtype("nn")


@pytest.mark.parametrize("kind", ["weights", "images"])
def test_files_of_a_store_are_read_by_their_user_alone_and_their_folder_goes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(weight_file.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    before = os.umask(0)
    try:
        if kind == "images":
            store: Any = SharedImageStore()
            store.hold([FakeMedia.of(3)])
        else:
            store = SharedWeightStore(TENSORS.items, torch.float32, num_bytes=1)
            store.put(1)
    finally:
        os.umask(before)
    [folder] = tmp_path.iterdir()
    [path] = folder.iterdir()
    assert [oct(one.stat().st_mode & 0o777) for one in (folder, path)] == ["0o700", "0o600"]
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_a_weight_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    (tmp_path / "a").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        write_weight_file(tmp_path / "a", TENSORS.items())
    assert (tmp_path / "other").read_text() == "kept"
