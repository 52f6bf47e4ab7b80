"""Rows that go round a ring: outputs and gradients of the whole row, whatever the heads, windows and segments.

The ranks are threads that hand tensors to one another through queues.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_models.attention.packed import PackedLayout, PiecedLayout
from rft_models.attention.ring import ring_attention
from rft_models.attention.ring_layout import CausalSpan, RingRow, inverse, zigzag
from rft_models.attention.sequence_parallel import takes_ring
from rft_models.attention.shared_prefix import find_shared_prefixes

WIDTH = 4


@dataclass
class ThreadRing:
    """One rank of a ring of threads."""

    rank: int
    size: int
    boxes: list[queue.Queue]
    came: list[list[Tensor]] = field(default_factory=list)
    num_calls: int = 0

    def pass_on(self, tensors: Sequence[Tensor], num_arriving: int) -> Callable[[], list[Tensor]]:
        self.boxes[(self.rank + 1) % self.size].put([tensor.detach().clone() for tensor in tensors])
        number, self.num_calls = self.num_calls, self.num_calls + 1

        def wait() -> list[Tensor]:
            while len(self.came) <= number:  # what comes belongs to the calls in their order, not to the waits
                self.came.append(self.boxes[self.rank].get(timeout=20))
            assert all(tensor.shape[0] == num_arriving for tensor in self.came[number])
            return self.came[number]

        return wait


def lengths_of(num_rows: int, size: int) -> list[int]:
    """As evenly as ranks share rows."""
    return [num_rows // size + (rank < num_rows % size) for rank in range(size)]


def on_ring(
    layout: PiecedLayout, tensors: Sequence[Tensor], upstream: Tensor, size: int, **settings: Any
) -> list[Tensor]:
    """Output and the gradients of query, key and value, put together from all ranks."""
    num_rows = upstream.shape[0]
    lengths = lengths_of(num_rows, size)
    order = zigzag(lengths)
    boxes: list[queue.Queue] = [queue.Queue() for _ in range(size)]
    parts: list[list[Tensor]] = [[] for _ in range(size)]

    def one(rank: int) -> None:
        row = RingRow(layout.pieces(), lengths, rank, order, tile=3)
        own = row.rows_of(rank)
        given = [tensor[own].detach().requires_grad_() for tensor in tensors]
        query, key, value = given
        found = ring_attention(query, key, value, row, ThreadRing(rank, size, boxes), **settings)
        found.backward(upstream[own])
        parts[rank] = [found.detach(), *(tensor.grad for tensor in given if tensor.grad is not None)]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    back = inverse(order)
    return [torch.cat(columns)[back] for columns in zip(*parts, strict=True)]


def whole(layout: PiecedLayout, tensors: Sequence[Tensor], upstream: Tensor, **settings: Any) -> list[Tensor]:
    """The same by the packed attention."""
    given = [tensor.detach().requires_grad_() for tensor in tensors]
    found = layout.attend(*given, **settings)
    found.backward(upstream)
    return [found.detach(), *(tensor.grad for tensor in given if tensor.grad is not None)]


def random_row(num_rows: int, heads: tuple[int, int], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(num_rows)
    query, upstream = (torch.randn(num_rows, heads[0], WIDTH, dtype=dtype) for _ in range(2))
    return [query, *(torch.randn(num_rows, heads[1], WIDTH, dtype=dtype) for _ in range(2))], upstream


def prompts_of(num_rows: int) -> PiecedLayout:
    """Three samples of one prompt of 5, then a segment alone: the prompt stands once in the row."""
    tokens = torch.cat([torch.tensor([1, 2, 3, 4, 5, *range(10 + 9 * i, 12 + 10 * i)]) for i in range(3)])
    alone = torch.arange(50, 50 + num_rows)
    segments = torch.cat([torch.full((7 + i,), i) for i in range(3)] + [torch.full((num_rows,), 3)])
    positions = torch.cat([torch.arange(7 + i) for i in range(3)] + [torch.arange(num_rows)])
    wanted = positions >= 5
    shared = find_shared_prefixes(torch.cat([tokens, alone]), positions, segments, wanted)
    assert shared is not None
    return shared.layout


LAYOUTS: dict[str, Callable[[], tuple[PiecedLayout, int]]] = {
    "one segment": lambda: (PackedLayout.from_lengths([13]), 13),
    "segments over ranks": lambda: (PackedLayout.from_lengths([5, 1, 9, 3]), 18),
    "a prompt once": lambda: (prompts_of(6), 5 + 2 + 3 + 4 + 6),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (3, 1)])
def test_ring_equals_whole_row(name: str, heads: tuple[int, int], size: int) -> None:
    layout, num_rows = LAYOUTS[name]()
    tensors, upstream = random_row(num_rows, heads, torch.float64)
    for settings in ({}, {"sliding_window": 4}, {"softcap": 1.5}, {"sliding_window": 2, "softcap": 3.0}):
        expected = whole(layout, tensors, upstream, scaling=0.7, **settings)
        found = on_ring(layout, tensors, upstream, size, scaling=0.7, **settings)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_float32_within_1e_5_and_bfloat16_as_near_as_its_digits(size: int) -> None:
    layout, num_rows = LAYOUTS["segments over ranks"]()
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        tensors, upstream = random_row(num_rows, (4, 2), dtype)
        doubles = [tensor.double() for tensor in tensors]
        expected = whole(layout, doubles, upstream.double(), scaling=0.5)
        found = on_ring(layout, tensors, upstream, size, scaling=0.5)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype is dtype
            assert float((one.double() - other).norm() / other.norm()) < limit


def test_ranks_without_rows_pass_on_what_they_get() -> None:
    layout = PackedLayout.from_lengths([2, 1])
    tensors, upstream = random_row(3, (3, 1), torch.float64)
    expected = whole(layout, tensors, upstream, scaling=1.0)
    for one, other in zip(on_ring(layout, tensors, upstream, 4, scaling=1.0), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_large_scores_cost_no_digits() -> None:
    layout = PackedLayout.from_lengths([12])
    tensors, upstream = random_row(12, (2, 2), torch.float32)
    tensors[0] = tensors[0] * 300
    expected = whole(layout, tensors, upstream, scaling=1.0)
    for one, other in zip(on_ring(layout, tensors, upstream, 3, scaling=1.0), expected, strict=True):
        assert bool(one.isfinite().all())
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_rows_in_the_order_of_the_ranks() -> None:
    assert zigzag([4, 4]).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert zigzag([3, 3, 2]).tolist() == [0, 1, 7, 2, 3, 6, 4, 5]
    assert sorted(zigzag([5, 4, 4, 4]).tolist()) == list(range(17))
    order = zigzag([3, 3, 2])
    assert order[inverse(order)].tolist() == list(range(8))


def num_visible_keys(row: RingRow, sliding_window: int | None = None) -> list[int]:
    """Count the keys that the rows of each rank see, all together: what a rank has to compute."""
    sight = CausalSpan.of(row.pieces, sliding_window)
    place_K = torch.arange(sight.own_first.shape[0])
    seen_K = (place_K - sight.own_first + 1) + (sight.prefix_behind - sight.prefix_first)
    ends = list(accumulate(row.lengths, initial=0))
    return [int(seen_K[row.order_K[first:behind]].sum()) for first, behind in pairwise(ends)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_see_about_equally_many_keys(size: int) -> None:
    """Of one long segment a run of neighbours would give the last rank 2 - 1 / S times its share."""
    num_rows = 64 * size
    row = RingRow.of(PackedLayout.from_lengths([num_rows]).pieces(), [64] * size, 0, torch.device("cpu"))
    seen = num_visible_keys(row)
    assert sum(seen) == num_rows * (num_rows + 1) // 2
    assert max(seen) == min(seen)
    windowed = num_visible_keys(row, 16)
    assert max(windowed) <= 1.15 * min(windowed)


def test_what_a_row_sees_is_what_its_mask_says() -> None:
    layout = prompts_of(4)
    sight = CausalSpan.of(layout.pieces(), None)
    rows = torch.arange(sight.own_first.shape[0])
    mask = sight.mask(rows, rows)
    # the row: prompt 0-4, a segment alone in 5-8, and own tokens behind the prompt in 9-10, 11-13 and 14-17
    seen = {row: mask[row].nonzero()[:, 0].tolist() for row in (3, 8, 10, 13, 17)}
    assert seen == {
        3: [0, 1, 2, 3],
        8: [5, 6, 7, 8],
        10: [0, 1, 2, 3, 4, 9, 10],
        13: [0, 1, 2, 3, 4, 11, 12, 13],
        17: [0, 1, 2, 3, 4, 14, 15, 16, 17],
    }
    assert not bool(mask.triu(1).any())
    assert bool(mask.diagonal().all())


def test_only_seen_tiles_are_computed() -> None:
    row = RingRow(PackedLayout.from_lengths([32]).pieces(), [16, 16], 0, zigzag([16, 16]), tile=8)
    own, other = row.tiles(0, None), row.tiles(1, None)
    # rank 0 has rows 0-7 and 24-31, rank 1 has 8-15 and 16-23
    assert [(t.query.start, t.keys.start, t.is_whole) for t in own] == [(0, 0, False), (8, 0, True), (8, 8, False)]
    assert [(t.query.start, t.keys.start, t.is_whole) for t in other] == [(8, 0, True), (8, 8, True)]


class Config:
    def __init__(self, heads: int, groups: int | None, dropout: float = 0.0) -> None:
        self.num_attention_heads, self.num_key_value_heads, self.attention_dropout = heads, groups, dropout


def test_a_ring_where_heads_do_not_divide() -> None:
    from rft_core.errors import OptionsError

    assert [takes_ring("auto", Config(*heads), 2, "m") for heads in ((4, 2), (4, 1), (3, 3), (4, None))] == [
        False,
        True,
        True,
        False,
    ]
    assert not takes_ring("ulysses", Config(3, 3), 2, "m")
    assert takes_ring("ring", Config(4, 4), 2, "m")
    with pytest.raises(OptionsError) as caught:
        takes_ring("auto", Config(3, 3, 0.1), 2, "m")
    assert caught.value.problem.code == "models.ring_dropout"
