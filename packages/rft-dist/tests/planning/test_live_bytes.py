"""Bytes of live tensors, by hand."""

from __future__ import annotations

import torch
from torch import nn

from rft_dist.planning.live_bytes import LiveBytes

MIB = 2**20


def block() -> torch.Tensor:
    return torch.zeros(MIB // 4)


def test_a_storage_counts_once_from_its_making_to_its_end() -> None:
    before = block()
    with LiveBytes() as live:
        one = block()
        two, view = one + 1, one[:8]
        assert (live.now, live.peak) == (2 * MIB, 2 * MIB)
        del one
        assert live.now == 2 * MIB, "the view keeps it"
        del view
        assert live.now == MIB
        before.add_(1)
        assert live.now == MIB, "what was there before is not counted"
        live.forget_peak()
        del two
        assert (live.now, live.peak) == (0, MIB)


def test_what_a_backward_pass_needs_is_alive_until_it_has_passed() -> None:
    weight = nn.Parameter(torch.ones(MIB // 4))
    with LiveBytes() as live:
        loss = (weight.exp() * weight).sum()
        assert live.now >= MIB, "exp keeps its result"
        loss.backward()
        del loss
        assert live.now == MIB, "the gradient alone is left"
        assert live.peak >= 2 * MIB


def test_a_storage_that_is_resized_counts_as_it_is() -> None:
    with LiveBytes() as live:
        tensor = block()
        tensor.untyped_storage().resize_(0)
        assert live.now == 0
        tensor.untyped_storage().resize_(MIB)
        assert live.now == MIB
    assert live.peak == MIB
    spare = block()
    spare.untyped_storage().resize_(0)
    assert live.now == MIB, "outside nothing is counted"
