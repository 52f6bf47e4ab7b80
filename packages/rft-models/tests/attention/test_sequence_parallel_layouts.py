"""Heads that ranks trade for rows, the rows that each one computes, and when they form a ring."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import OptionsError
from rft_models.attention import sequence_parallel as module
from rft_models.attention.packed import PackedLayout
from rft_models.attention.ring_layout import inverse, zigzag
from rft_models.attention.sequence_parallel import (
    RingLayout,
    SequenceMode,
    SequenceShard,
    SequenceShards,
    SplitLayout,
    even_heads,
    local_rows,
    takes_ring,
)


class Ranks:
    """Threads that trade rows for heads."""

    def __init__(self, rank: int, given: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(given)
        self._given, self._barrier = given, barrier

    def lengths(self, num_rows: int) -> list[int]:
        """Of each rank."""
        return [num_rows // self.size + (rank < num_rows % self.size) for rank in range(self.size)]

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """Of this rank."""
        first = sum(self.lengths(num_rows)[: self.rank])
        return first, first + self.lengths(num_rows)[self.rank]

    def to_heads(self, rows_LHD: Tensor, num_rows: int) -> Tensor:
        """All rows of this rank's heads."""
        whole = torch.cat(self._all(rows_LHD))
        assert len(whole) == num_rows
        return whole.chunk(self.size, 1)[self.rank]

    def to_rows(self, rows_THD: Tensor, num_rows: int) -> Tensor:
        """All heads of this rank's rows."""
        first, behind = self.bounds(num_rows)
        return torch.cat(self._all(rows_THD), 1)[first:behind]

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self._given[self.rank] = tensor
        self._barrier.wait(30)
        found = [given for given in self._given if given is not None]
        self._barrier.wait(30)
        return found


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 2), (4, 1, 2), (3, 3, 2), (6, 2, 4), (3, 1, 3)])
def test_ranks_that_trade_heads_compute_the_whole_rows_attention(heads: int, groups: int, size: int) -> None:
    whole = PackedLayout.from_lengths([4, 1, 6])
    generator = torch.Generator().manual_seed(1)
    sizes = ((11, heads, 5), (11, groups, 5), (11, groups, 5))
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in sizes]
    settings: dict[str, Any] = {"scaling": 0.4, "sliding_window": 3}
    shared: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        ranks: Any = Ranks(rank, shared, barrier)
        shard = SequenceShards(ranks, by_ring=False).of(whole, 11, torch.device("cpu"))
        assert isinstance(shard.layout, SplitLayout)
        results[rank] = shard, shard.layout.attend(*(tensor[shard.rows] for tensor in given), **settings)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    torch.testing.assert_close(torch.cat([rows for _, rows in results]), whole.attend(*given, **settings))
    assert all(rows.is_contiguous() for _, rows in results)
    ends = [shard.here for shard, _ in results]
    assert (ends[0][0], ends[-1][1]) == (0, 11)
    place = torch.arange(3)
    assert results[0][0].places(None) is None
    assert results[0][0].places(place) is place


def test_heads_that_do_not_divide_get_heads_of_zeros_and_keys_of_their_own() -> None:
    query, key, value = torch.ones(2, 6, 3), torch.arange(2.0)[None, :, None].expand(2, 2, 3), torch.zeros(2, 2, 3)
    for found, given in zip(even_heads(query, key, value, 2), (query, key, value), strict=True):
        assert found is given
    wide, keys, values = even_heads(query, key, value + 5, 4)
    assert [tuple(tensor.shape) for tensor in (wide, keys, values)] == [(2, 8, 3)] * 3
    for row in range(2):
        assert wide[row].tolist() == [[1.0] * 3] * 6 + [[0.0] * 3] * 2
        assert keys[row].tolist() == [[0.0] * 3] * 3 + [[1.0] * 3] * 3 + [[0.0] * 3] * 2
        assert values[row].tolist() == [[5.0] * 3] * 6 + [[0.0] * 3] * 2
    same, repeated, _ = even_heads(query, key, value, 3)
    assert torch.equal(same, query)
    assert repeated[0, :, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_a_rank_of_a_ring_has_the_rows_of_the_zigzag(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PackedLayout.from_lengths([4, 7])
    ranks: Any = Ranks(1, [None, None], threading.Barrier(2))
    shard = SequenceShards(ranks, by_ring=True).of(whole, 11, torch.device("cpu"))
    order = zigzag([6, 5])
    assert isinstance(shard.layout, RingLayout)
    assert shard.order_K is not None
    assert shard.order_K.tolist() == order.tolist()
    assert shard.here == (6, 11)
    assert isinstance(shard.rows, Tensor)
    assert shard.rows.tolist() == order[6:].tolist()
    row = shard.layout.row
    assert (row.pieces, row.lengths, row.rank) == (whole.pieces(), [6, 5], 1)
    place, tokens = inverse(order), torch.tensor([10, 0, 3])
    for given, expected in ((None, place), (tokens, place[tokens])):
        found = shard.places(given)
        assert found is not None
        assert found.tolist() == expected.tolist()
    calls: list[Any] = []
    monkeypatch.setattr(module, "ring_attention", lambda *words, **settings: calls.append((words, settings)) or "rows")
    query, key, value = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    assert shard.layout.attend(query, key, value, scaling=0.3, softcap=None) == "rows"
    assert calls == [((query, key, value, row, ranks), {"scaling": 0.3, "softcap": None})]


def test_a_run_of_rows_is_a_slice() -> None:
    layout: Any = None
    assert SequenceShard(layout, (3, 5), None).rows == slice(3, 5)


@pytest.mark.parametrize(
    ("mode", "heads", "groups", "num_ranks", "ring"),
    [
        ("auto", 4, 2, 2, False),
        ("auto", 4, None, 2, False),
        ("auto", 4, 1, 2, True),
        ("auto", 3, 3, 2, True),
        ("auto", 4, 4, 3, True),
        ("auto", 6, 2, 3, True),
        ("auto", 3, 2, 2, True),
        ("ulysses", 3, 3, 2, False),
        ("ring", 4, 2, 2, True),
        ("ring", 3, 3, 2, True),
    ],
)
def test_a_ring_is_formed_where_heads_do_not_divide_or_it_is_asked_for(
    mode: SequenceMode, heads: int, groups: int | None, num_ranks: int, ring: bool
) -> None:
    for dropout in ({}, {"attention_dropout": None}, {"attention_dropout": 0.0}, {"attention_dropout": 0.05}):
        config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=groups, **dropout)
        if ring and dropout.get("attention_dropout"):
            with pytest.raises(OptionsError) as caught:
                takes_ring(mode, config, num_ranks, "here")
            assert caught.value.problem.code == "models.ring_dropout"
        else:
            assert takes_ring(mode, config, num_ranks, "here") is ring


def test_a_decoder_that_names_no_heads_has_one() -> None:
    assert takes_ring("auto", SimpleNamespace(), 2, "here")
    assert not takes_ring("auto", SimpleNamespace(), 1, "here")


def test_rows_from_the_first_to_before_the_last_bound_are_local() -> None:
    tokens, rows = local_rows(torch.tensor([10, 11, 12, 13, 14]), torch.tensor([5, 2, 3, 4, 1]), (2, 5))
    assert (tokens.tolist(), rows.tolist()) == ([11, 12, 13], [0, 1, 2])
