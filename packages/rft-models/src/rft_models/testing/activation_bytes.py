"""Bytes of tensors that a forward pass leaves behind for its backward pass; the same number in every run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def held_for_backward(forward: Callable[[], Tensor], known: Iterable[Tensor]) -> tuple[Tensor, int]:
    """(result of the forward, bytes of the memory that it took and that is alive while the result is).

    `known` are tensors that were there before and may come out of an operation as they are: parameters and buffers.
    A view counts as the whole memory that it keeps alive, once.
    """
    with _NewMemory(known) as memory:
        result = forward()
    gc.collect()  # tensors in reference cycles would count as alive otherwise
    return result, memory.num_bytes


class _NewMemory(TorchDispatchMode):
    """Dispatch mode that records the memory of every tensor that an operation returns."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the new memory that is alive."""
        return sum(size for reference, size in self._seen.values() if not reference.expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation unchanged and record its results."""
        del types
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known or storage.nbytes() == 0:
            return
        if address not in self._seen or self._seen[address][0].expired():
            self._seen[address] = StorageWeakRef(storage), storage.nbytes()
