"""Copies of tensors in host memory, made while training waits and written after it has gone on.

The buffers stay for the next save: touching new memory for the first time costs more than the copy
(a page fault every 4 KiB). Where CUDA is in use they are pinned, so that the copies run at the speed
of the bus and one wait is enough for all. A run that saves this way holds one copy of its state.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rft_dist.checkpoint_format.safetensors_pieces import num_tensor_bytes
from rft_dist.checkpoint_format.shards import Shard

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
RESERVE_BYTES = 2**30
"""Host memory that copies leave free."""


class HostCopies:
    """One set of copies, made anew at every save into the same buffers.

    Tensors that share their memory share it in the copies too: a library that writes a tied weight
    once recognises it by its address.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._made: dict[tuple[object, ...], Tensor] = {}
        self._waits_for_cuda = False

    def begin(self) -> None:
        """Start a new set: the copies of the one before may be overwritten from now on."""
        self._made = {}

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A contiguous copy on the CPU; complete after `finish`."""
        # keyed by memory, not by name: a tied weight is copied once, and stays tied in the copies
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in self._made:
            return self._made[key]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = buffer
        self._waits_for_cuda |= tensor.device.type == "cuda"
        with torch.no_grad():
            buffer.copy_(tensor, non_blocking=True)
        self._made[key] = buffer
        return buffer

    def copy_shard(self, component: str, shard: Shard) -> Shard:
        """The shard with a copy of its data."""
        name = f"{component}/{shard.name}@{','.join(map(str, shard.start))}"
        return Shard(shard.name, shard.global_shape, shard.start, self.copy(name, shard.data))

    def finish(self) -> None:
        """Wait until everything is copied."""
        if self._waits_for_cuda:
            torch.cuda.synchronize()

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return sum(map(num_tensor_bytes, self._buffers.values()))


def available_bytes() -> int | None:
    """Host memory that this process can still take: of the machine, and of its control group. None where unknown."""
    limits: list[int] = []
    if _MEMORY.is_file():
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    limit, used = _GROUP / "memory.max", _GROUP / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        cached = _inactive_file(_GROUP / "memory.stat")
        limits.append(int(limit.read_text()) - int(used.read_text()) + cached)
    return min(limits, default=None)


def _inactive_file(statistics: Path) -> int:
    """Cached file pages of the group, which the system gives up when memory is asked for."""
    lines = statistics.read_text().splitlines() if statistics.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
