"""Copies of tensors in host memory, made while training waits and written after it has gone on.

The buffers stay for the next save: touching new memory for the first time costs more than the copy
(a page fault every 4 KiB). Where CUDA is in use they are pinned, so that the copies run at the speed
of the bus and one wait is enough for all. A run that saves this way holds one copy of its state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_dist.checkpoint_format.safetensors_pieces import num_tensor_bytes
from rft_dist.checkpoint_format.shards import Shard

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
