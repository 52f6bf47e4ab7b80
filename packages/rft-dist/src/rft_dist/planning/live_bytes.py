"""Bytes of live tensors during a computation: a count of storages, the same on every machine.

An allocator's figures depend on its rounding and its cache, a process's on everything that it has loaded. Here a
storage counts from the operation that made it until it is freed or resized, whoever holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what operations inside of it allocate on one kind of device.

    Example::

        with LiveBytes("cpu") as live:
            y = model(x)
            kept = live.now
        live.peak
    """

    def __init__(self, device_type: str = "cpu", *, full: bool = False) -> None:
        """`full`: there was no tensor before, so what operations are given counts too: files make tensors by none."""
        super().__init__()
        self._full = full
        self.now = 0
        """Bytes alive."""
        self.peak = 0
        """Most bytes at once since the start, or since `forget_peak`."""
        self.device_type = device_type
        self._sizes: dict[int, int] = {}
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def forget_peak(self) -> None:
        """Look for a peak from now on."""
        self.peak = self.now

    def __enter__(self) -> Self:
        original, resized = torch.UntypedStorage.resize_, self._resized

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            resized(storage)
            return result

        self._resize = original
        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]  # how FSDP2 frees and takes back the weights that it has gathered
        return super().__enter__()

    def __exit__(self, *arguments: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs: set[int] = set()  # views and changes in place make nothing
        for storage in _storages((args, kwargs)):
            inputs.add(storage._cdata)
            if self._full:
                self._take_in(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in inputs:
                self._take_in(storage)
        return result

    def _take_in(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or not self.counts(storage):
            return
        # known before its bytes are counted: `_resized` counts the difference to what is known
        self._sizes[key] = 0
        weakref.finalize(storage, self._freed, key)
        self._resized(storage)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            change = storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self._count(key, change)

    def _freed(self, key: int) -> None:
        self._count(key, -self._sizes.pop(key, 0))

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Return whether this memory counts."""
        return storage.device.type == self.device_type

    def _count(self, key: int, change: int) -> None:
        """Add bytes of the storage that is known by `key`."""
        del key
        self.now += change
        self.peak = max(self.peak, self.now)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield from (tensor.untyped_storage() for tensor in _inner(leaf))


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors of a distributed one."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # a distributed tensor names its mesh too
            yield from _inner(part)
