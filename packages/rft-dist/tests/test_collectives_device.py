"""Exchanges over a backend whose tensors are on a device of its own, which is the host's memory under another name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rft_dist.collectives import TorchCollectives

DEVICE = torch.device("cuda", 0)


class Backend(TorchFunctionMode):
    """Takes tensors of its device alone, which carry no graph; the other of two ranks has twice what this one has."""

    def __init__(self) -> None:
        super().__init__()
        self.here: dict[int, Tensor] = {}
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.to and DEVICE in args:
            copied = args[0].clone(memory_format=named.get("memory_format", torch.preserve_format))
            return self.here.setdefault(copied.data_ptr(), copied)
        if named.get("device") == DEVICE:
            made = func(*args, **(named | {"device": "cpu"}))
            return self.here.setdefault(made.data_ptr(), made)
        if func is torch.empty_like and args[0].data_ptr() in self.here:
            made = func(*args, **named)
            return self.here.setdefault(made.data_ptr(), made)
        return func(*args, **named)

    def check(self, *tensors: Tensor) -> None:
        self.num_calls += 1
        for tensor in tensors:
            assert tensor.data_ptr() in self.here, "not on the device of the backend"
            assert not tensor.requires_grad
            assert tensor.is_contiguous()

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        self.check(tensor)
        tensor.mul_(3 if op == dist.ReduceOp.SUM else 2)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        assert src == 0
        self.check(tensor)
        tensor.add_(1)

    def all_gather(self, parts: list[Tensor], tensor: Tensor) -> None:
        self.check(tensor, *parts)
        parts[0].copy_(tensor)
        parts[1].copy_(2 * tensor if tensor.dtype is torch.int64 else tensor)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    made = Backend()
    for name in ("all_reduce", "broadcast", "all_gather"):
        monkeypatch.setattr(dist, name, getattr(made, name))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with made:
        yield made


def test_what_is_elsewhere_is_copied_there_and_back(backend: Backend) -> None:
    ranks = TorchCollectives(DEVICE)
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    assert ranks.sum(own).tolist() == [[3.0, 6.0], [9.0, 12.0]]
    assert ranks.max(own.T).tolist() == [[2.0, 6.0], [4.0, 8.0]]
    assert own.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert backend.num_calls == 2


def test_in_place_the_result_comes_back_into_the_tensor_that_was_given(backend: Backend) -> None:
    ranks = TorchCollectives(DEVICE)
    total, first = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
    ranks.sum_in_place(total)
    ranks.broadcast_in_place(first)
    assert total.tolist() == [3.0, 6.0]
    assert first.tolist() == [2.0, 3.0]
    assert backend.num_calls == 2


def test_lengths_and_bytes_travel_over_the_device_too(backend: Backend) -> None:
    ranks = TorchCollectives(DEVICE)
    assert ranks.gather_bytes(b"ab") == [b"ab", b"ab\0\0"]
    assert backend.num_calls == 2, "lengths, then bytes"
    assert ranks.gather_bytes(b"") == [b"", b""]
    assert backend.num_calls == 3
    assert ranks.broadcast_bytes(b"ab") == b"bc"
    assert backend.num_calls == 5
