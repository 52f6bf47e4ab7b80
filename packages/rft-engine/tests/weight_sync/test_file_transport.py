"""The file by which weights reach an engine: its name, its descriptor, and room for the header of all its tensors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_engine.weight_sync import file_transport
from rft_engine.weight_sync.file_transport import FileTransport


class Source:
    num_bytes, num_tensors = 50, 30

    def tensors(self, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
        return [("a", torch.ones(3, dtype=dtype))]


class Workers:
    """Workers that keep what they are asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def rpc(self, method: str, arguments: Sequence[Any] = (), seconds: float | None = None) -> list[Any]:
        self.asked.append((method, arguments, seconds))
        return [{"a": "digest"}]


def test_the_file_is_made_with_room_for_its_tensors_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors: list[int] = []
    make, written = tempfile.mkstemp, list[Any]()

    def mkstemp(**options: Any) -> tuple[int, str]:
        descriptor, name = make(**options)
        descriptors.append(os.dup2(descriptor, 201))
        os.close(descriptor)
        return descriptors[-1], name

    def write(path: Path, tensors: Any, expected_tensors: int) -> None:
        written.append((path, [(name, tensor.dtype) for name, tensor in tensors], expected_tensors))

    monkeypatch.setattr(file_transport.tempfile, "mkstemp", mkstemp)
    monkeypatch.setattr(file_transport, "write_weight_file", write)
    monkeypatch.setattr(file_transport, "shared_directory", lambda size: tmp_path)
    workers = Workers()
    assert FileTransport(Source(), workers, "float16", 7.0).send() == [{"a": "digest"}]  # type: ignore[arg-type]
    [(path, tensors, expected)] = written
    assert (path.parent, path.suffix, expected) == (tmp_path, ".safetensors", 60)
    assert path.name.startswith("rft-weights-")
    assert tensors == [("a", torch.float16)]
    assert workers.asked == [("rft_load_file", [str(path)], 7.0)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])
    assert list(tmp_path.iterdir()) == []
