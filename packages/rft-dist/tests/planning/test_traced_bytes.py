"""Bytes of operations on tensors without values: the same count as with values, sorted by what they are for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rft_dist.planning.live_bytes import LiveBytes
from rft_dist.planning.traced_bytes import ACTIVATIONS, GRADIENTS, LOGITS, TracedBytes

ROWS, WIDE, HIGH = 7, 33, 12


def step(first: Tensor, second: Tensor, ids: Tensor) -> None:
    F.silu(F.embedding(ids, first)).matmul(second).logsumexp(1).sum().backward()


def test_a_step_without_values_counts_as_one_with_values() -> None:
    ids = torch.arange(ROWS) % HIGH
    shapes = ((HIGH, WIDE), (WIDE, HIGH))
    real = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    with LiveBytes() as live:
        step(real[0], real[1], ids)
    traced = TracedBytes()
    fake = [nn.Parameter(traced.fake(torch.empty(shape, device="meta"))) for shape in shapes]
    traced.watch(fake)
    with traced:
        step(fake[0], fake[1], ids)
    assert (traced.peak, traced.now) == (live.peak, live.now)
    assert traced.of(GRADIENTS) == traced.now == 2 * 4 * HIGH * WIDE
    assert traced.of(ACTIVATIONS) == traced.of(LOGITS) == 0
    assert sum(traced.at_peak.values()) == traced.peak


def test_a_trace_takes_no_memory_of_its_tensors() -> None:
    traced = TracedBytes()
    weight = nn.Parameter(traced.fake(torch.empty(1 << 20, 1 << 20, device="meta")))
    with traced:
        (weight * 2).sum().backward()
    assert traced.peak >= 4 << 40


def test_memory_counts_under_the_label_of_its_operation_until_it_is_freed() -> None:
    traced = TracedBytes()
    tensor = traced.fake(torch.empty(10, device="meta"))
    with traced:
        one = tensor + 1
        with traced.labelled(LOGITS, frozenset((80,))):
            two = tensor * 2
            three = torch.cat([two, two])
        four = tensor * 4
        assert [traced.of(label) for label in (ACTIVATIONS, LOGITS, GRADIENTS)] == [80, 40, 80]
        traced.relabel(four, GRADIENTS)
        assert [traced.of(label) for label in (ACTIVATIONS, LOGITS, GRADIENTS)] == [40, 40, 120]
        del one, three
        assert [traced.of(label) for label in (ACTIVATIONS, LOGITS, GRADIENTS)] == [0, 40, 40]
    assert traced.at_peak == {ACTIVATIONS: 80, LOGITS: 40, GRADIENTS: 80}
    traced.forget_peak()
    assert (traced.peak, traced.at_peak) == (80, {ACTIVATIONS: 0, LOGITS: 40, GRADIENTS: 40})


def test_what_needs_values_leaves_nothing_out() -> None:
    traced = TracedBytes()
    row = traced.fake(torch.empty(ROWS, device="meta"))
    with traced:
        assert (row != 0).nonzero().tolist() == [[place] for place in range(ROWS)]
        assert bool((row > 0).all())
        assert (float(row.sum()), int(row.long().sum())) == (1.0, 1)
        assert row[row > 0].shape == (ROWS,)
        assert row[torch.arange(ROWS) < 3].shape == (3,)
        assert torch.equal(row, row + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_have_shapes_in_every_type(dtype: torch.dtype) -> None:
    traced = TracedBytes()
    rows_SK, experts_EKN = (
        traced.fake(torch.empty(*size, dtype=dtype, device="meta")) for size in ((48, 16), (3, 16, 32))
    )
    ends_E = torch.tensor([16, 32, 48], dtype=torch.int32)
    with traced:
        product = torch.ops.aten._grouped_mm.default(rows_SK, experts_EKN, ends_E)
        slopes = torch.ops.aten._grouped_mm.default(rows_SK.t(), product, ends_E)
        assert (tuple(product.shape), tuple(slopes.shape)) == ((48, 32), (3, 16, 32))
        assert traced.now == product.nbytes + slopes.nbytes
