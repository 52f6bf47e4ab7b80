"""Weights through a file in shared memory, which the engine's workers map: works for every engine and device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rft_engine.weight_sync.fingerprints import Fingerprint, WeightSource
from rft_engine.weight_sync.weight_file import shared_directory, write_weight_file


class Workers(Protocol):
    """The workers of one engine, here or in a process of their own."""

    def rpc(self, method: str, arguments: Sequence[Any] = (), seconds: float | None = None) -> list[Any]:
        """Call a method of every worker by name; one result each."""
        ...


class Transport(Protocol):
    """A way for the tensors of one source to reach one engine."""

    def send(self) -> list[Fingerprint]:
        """Send everything; return the fingerprint that each worker received, an empty list where none is reported."""
        ...


class FileTransport:
    """Sends the tensors of one source to one engine in a file that is deleted afterwards."""

    def __init__(self, source: WeightSource, workers: Workers, dtype: str, seconds: float) -> None:
        """Store the two ends.

        Args:
            source: what is sent.
            workers: the engine's workers, which have the method `rft_load_file`.
            dtype: of the tensors in the file: float32, bfloat16 or float16.
            seconds: deadline of a load.
        """
        self._source, self._workers, self._seconds = source, workers, seconds
        self._dtype = torch_dtype(dtype)

    def send(self) -> list[Fingerprint]:
        """Send everything; return the fingerprint that each worker received.

        Raises:
            ServiceError: the source is not complete.
            StorageError: no room for the file.
        """
        directory = shared_directory(2 * self._source.num_bytes)
        descriptor, name = tempfile.mkstemp(prefix="rft-weights-", suffix=".safetensors", dir=directory)
        # `write_weight_file` opens the file itself
        os.close(descriptor)
        try:
            write_weight_file(Path(name), self._source.tensors(self._dtype), 2 * self._source.num_tensors)
            return self._workers.rpc("rft_load_file", [name], self._seconds)
        finally:
            # every worker has answered, or has failed: nobody opens it any more
            Path(name).unlink(missing_ok=True)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype
