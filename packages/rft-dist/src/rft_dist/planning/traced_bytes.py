"""Bytes of a computation on tensors that have shapes and no values, by what they are for.

A tensor without values (torch's fake tensor) answers every operation with another one of the right shape, so a step of
a model is traced at no memory and without its machine. What needs values gets the answer with which nothing is left
out: every entry is nonzero, every number is 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from rft_dist.planning.live_bytes import LiveBytes

ACTIVATIONS = "activations"
GRADIENTS = "gradients"
LOGITS = "logits"


class TracedBytes(LiveBytes):
    """Counts what operations inside of it would allocate, in activations, gradients and logits.

    Tensors that were there before, as weights, do not count.

    Example::

        traced = TracedBytes()
        weight = torch.nn.Parameter(traced.fake(torch.empty(4096, 4096, device="meta")))
        traced.watch([weight])
        with traced:
            (x @ weight).sum().backward()
        traced.at_peak["gradients"]
    """

    def __init__(self) -> None:
        super().__init__("meta")
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._labels: dict[int, str] = {}
        self._label = ACTIVATIONS
        self._gradient_sizes: frozenset[int] = frozenset()
        self._by_label: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        """Bytes by what they are for, at the moment of the peak."""

    def fake(self, like: Tensor) -> Tensor:
        """Return a tensor without values of this shape and type, as if it were in the memory of a CPU."""
        with self._mode:
            return torch.empty(like.shape, dtype=like.dtype)

    def watch(self, parameters: list[nn.Parameter]) -> None:
        """Count the gradients of these as such from the moment that they are whole."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take_gradient)

    def forget_peak(self) -> None:
        """Look for a peak from now on."""
        super().forget_peak()
        self.at_peak = Counter(self._by_label)

    @contextmanager
    def labelled(self, label: str, gradient_sizes: frozenset[int] = frozenset()) -> Iterator[None]:
        """Count what is allocated inside as `label`; memory of one of the sizes, in bytes, is a gradient."""
        self.begin(label, gradient_sizes)
        try:
            yield
        finally:
            self.end()

    def begin(self, label: str, gradient_sizes: frozenset[int]) -> None:
        """Count what is allocated from here on as `label`, see `labelled`."""
        self._label, self._gradient_sizes = label, gradient_sizes

    def end(self) -> None:
        """Count what is allocated from here on as activations."""
        self._label, self._gradient_sizes = ACTIVATIONS, frozenset()

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Return True: small tensors with values, as places of tokens, are of the step too."""
        return storage.device.type in ("meta", "cpu")

    def of(self, label: str) -> int:
        """Return the bytes that are alive now of one label."""
        return self._by_label[label]

    def relabel(self, tensor: Tensor, label: str) -> None:
        """Count the memory of a tensor as `label` from now on."""
        key = tensor.untyped_storage()._cdata
        if key in self._sizes:
            self._by_label[self._labels.get(key, ACTIVATIONS)] -= self._sizes[key]
            self._by_label[label] += self._sizes[key]
            self._labels[key] = label

    def _take_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.relabel(parameter.grad, GRADIENTS)

    def _count(self, key: int, change: int) -> None:
        if key not in self._labels:
            self._labels[key] = GRADIENTS if change in self._gradient_sizes else self._label
        self._by_label[self._labels[key]] += change
        if key not in self._sizes:
            del self._labels[key]
        self.now += change
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, Counter(self._by_label)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            if func in _WITHOUT_VALUES:
                return _WITHOUT_VALUES[func](*args)
            if func is _GROUPED_PRODUCT:
                # some versions of torch give it a shape in bfloat16 alone
                func, args, kwargs = torch.ops.aten.new_empty.default, (args[0], _shape_of_grouped(*args)), None
            if func is torch.ops.aten.index.Tensor:
                args = (args[0], tree_map(_all_of_mask, args[1]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _every_entry(tensor: Tensor) -> Tensor:
    """[N, dimensions]: the places of all entries."""
    return torch.ones(tensor.shape).nonzero()


def _one(tensor: Tensor) -> float | int | bool:
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _all_of_mask(index: Any) -> Any:
    """Places in the stead of a mask, whose true entries have no shape of their own."""
    if isinstance(index, Tensor) and index.dtype is torch.bool:
        places = _every_entry(index) if isinstance(index, FakeTensor) else index.nonzero()
        return places[:, 0]
    return index


_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


def _shape_of_grouped(left: Tensor, right: Tensor, ends_E: Tensor | None = None, *_: object) -> list[int]:
    """Return the shape of a product of groups: rows of `left` by a matrix each, or their sums over rows."""
    if left.dim() == right.dim() == 2:
        assert ends_E is not None
        return [ends_E.shape[0], left.shape[0], right.shape[1]]
    return [*([left.shape[0]] if left.dim() == right.dim() == 3 else []), left.shape[-2], right.shape[-1]]


_WITHOUT_VALUES: dict[Any, Any] = {
    torch.ops.aten.nonzero.default: _every_entry,
    torch.ops.aten._local_scalar_dense.default: _one,
    torch.ops.aten.equal.default: lambda *_: True,
}
