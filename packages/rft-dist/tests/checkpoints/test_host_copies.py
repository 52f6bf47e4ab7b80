"""Copies in host memory: what is shared stays shared, buffers stay."""

from __future__ import annotations

import pytest
import torch

from rft_dist.checkpoint_format.shards import Shard
from rft_dist.checkpoints.host_copies import HostCopies


def test_a_copy_keeps_its_values_and_no_gradient() -> None:
    copies, tensor = HostCopies(), torch.arange(6.0).view(2, 3).T.clone().requires_grad_()
    copy = copies.copy("w", tensor)
    copies.finish()
    tensor.detach().zero_()
    assert copy.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert copy.is_contiguous()
    assert not copy.requires_grad
    assert copy.device.type == "cpu"
    assert copies.num_bytes == 24


def test_a_buffer_is_used_again_while_shape_and_type_stay() -> None:
    copies = HostCopies()
    first = copies.copy("w", torch.ones(3))
    copies.begin()
    again = copies.copy("w", torch.zeros(3))
    assert again is first
    assert first.tolist() == [0.0] * 3
    copies.begin()
    assert copies.copy("w", torch.ones(4)) is not first
    narrow = copies.copy("v", torch.ones(3, dtype=torch.bfloat16))
    copies.begin()
    assert copies.copy("v", torch.ones(3)).dtype == torch.float32
    assert narrow.dtype == torch.bfloat16


def test_what_shares_its_memory_is_copied_once_in_a_set() -> None:
    copies, tied = HostCopies(), torch.ones(3)
    assert copies.copy("a", tied) is copies.copy("b", tied)
    assert copies.copy("c", tied.view(3, 1)) is not copies.copy("a", tied)
    assert copies.copy("d", tied[:2]).tolist() == [1.0, 1.0]
    empty = torch.zeros(0)
    assert copies.copy("e", empty) is not copies.copy("f", empty)
    copies.begin()
    tied.fill_(2.0)
    assert copies.copy("a", tied).tolist() == [2.0] * 3
    square = torch.arange(4.0).view(2, 2)
    copies.begin()
    assert copies.copy("g", square).tolist() != copies.copy("h", square.T).tolist()


def test_a_shard_is_copied_with_its_place_and_two_of_one_tensor_apart() -> None:
    copies = HostCopies()
    shards = [Shard("w", (4, 2), (start, 0), torch.full((2, 2), float(start))) for start in (0, 2)]
    found = [copies.copy_shard("optimizer", shard) for shard in shards]
    assert [(each.name, each.global_shape, each.start) for each in found] == [
        ("w", (4, 2), (0, 0)),
        ("w", (4, 2), (2, 0)),
    ]
    assert [each.data[0, 0].item() for each in found] == [0.0, 2.0]
    other = copies.copy_shard("ema", Shard("w", (4, 2), (0, 0), torch.ones(2, 2)))
    assert found[0].data[0, 0].item() == 0.0
    assert other.data[0, 0].item() == 1.0


def test_a_cpu_is_not_waited_for_and_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    copies = HostCopies()
    copies.copy("w", torch.ones(1))
    copies.finish()
    assert not waited
    copies._waits_for_cuda = True
    copies.copy("w", torch.ones(2))
    copies.finish()
    assert waited == [1]
