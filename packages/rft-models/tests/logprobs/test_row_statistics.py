"""Sums of a row's logits, merged over slabs and ranks, against those of the whole row in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from vocabulary_ranks import Ranks, on_ranks

from rft_models.logprobs.row_statistics import (
    IGNORED,
    RowSums,
    SlabSums,
    merge_rows,
    merge_slabs,
    merged_over_ranks,
    to_logprobs,
    top_k_over_ranks,
)

ROWS, VOCAB = 5, 12


def logits() -> Tensor:
    """Row 0 has its highest entry twice, and row 1 one entry far above all others."""
    table = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    table[0, 3] = table[0, 9] = 4.0
    table[1, 7] = 60.0
    return table


TARGETS = torch.tensor([9, 2, 0, 11, 5])


def sums_of(table: Tensor, start: int, stop: int, *, moment: bool = True, argmax: bool = True) -> SlabSums:
    """The sums of entries start .. stop - 1 by their definition."""
    part = table[:, start:stop]
    if part.shape[1] == 0:
        nothing, zeros = table.new_full((ROWS,), -torch.inf), table.new_zeros(ROWS)
        ids = torch.zeros(ROWS, dtype=torch.int64)
        return SlabSums(nothing, zeros, zeros if moment else None, nothing, ids if argmax else None)
    highest = part.max(1).values
    below = part - highest[:, None]
    held = [float(table[row, target]) if start <= target < stop else -torch.inf for row, target in enumerate(TARGETS)]
    return SlabSums(
        highest,
        below.exp().sum(1),
        (below * below.exp()).sum(1) if moment else None,
        torch.tensor(held, dtype=torch.float64),
        part.argmax(1) + start if argmax else None,
    )


def assert_equal(found: SlabSums, expected: SlabSums) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


CUTS = [[0, 12], [0, 5, 12], [0, 1, 4, 8, 12], [0, 0, 6, 12], [0, 7, 12, 12]]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("moment", "argmax"), [(True, True), (False, True), (True, False)])
def test_slabs_and_ranks_merge_to_the_sums_of_the_whole_row(cuts: list[int], moment: bool, argmax: bool) -> None:
    table = logits()
    expected = sums_of(table, 0, VOCAB, moment=moment, argmax=argmax)
    parts = [sums_of(table, a, b, moment=moment, argmax=argmax) for a, b in pairwise(cuts)]
    columns = [None if column[0] is None else torch.stack(column) for column in zip(*parts, strict=True)]  # type: ignore[arg-type]
    assert_equal(merge_rows(SlabSums(*columns)), expected)  # type: ignore[arg-type]

    def on_rank(ranks: Ranks, start: int, stop: int) -> SlabSums:
        return merged_over_ranks(sums_of(table, start, stop, moment=moment, argmax=argmax), ranks)

    for found in on_ranks(cuts, on_rank):
        assert_equal(found, expected)


def test_rows_of_several_chunks_stand_one_after_another() -> None:
    whole = sums_of(logits(), 0, VOCAB)
    for cuts in ([2, 3], [1, 1, 3]):
        parts = zip(*(column.split(cuts) for column in whole if column is not None), strict=True)
        assert_equal(merge_slabs([SlabSums(*part) for part in parts]), whole)
    plain = sums_of(logits(), 0, VOCAB, moment=False, argmax=False)
    doubled = merge_slabs([plain, plain])
    assert doubled.moment is doubled.argmax is None
    assert doubled.highest.tolist() == 2 * plain.highest.tolist()
    assert merge_slabs([whole]) is whole


def test_logprobs_and_entropies_are_those_of_the_softmax() -> None:
    table = logits()
    targets = TARGETS.clone()
    targets[2] = IGNORED
    sums = sums_of(table, 0, VOCAB)
    found = to_logprobs(sums, targets)
    logprobs = torch.log_softmax(table, 1)
    expected = logprobs.gather(1, TARGETS[:, None])[:, 0]
    expected[2] = 0.0
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.entropy, -(logprobs.exp() * logprobs).sum(1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.highest + found.log_total, table.logsumexp(1), rtol=1e-13, atol=1e-13)
    assert found.highest.tolist() == table.amax(1).tolist()
    assert found.argmax is not None
    assert found.argmax.tolist() == [3, 7, *table.argmax(1)[2:].tolist()]
    plain: RowSums = to_logprobs(sums_of(table, 0, VOCAB, moment=False, argmax=False), targets)
    assert plain.logprobs.tolist() == found.logprobs.tolist()
    assert plain.entropy.tolist() == [0.0] * ROWS
    assert plain.argmax is None


def test_the_number_of_an_ignored_target_is_that_of_torch() -> None:
    loss = torch.nn.functional.cross_entropy(logits(), torch.full((ROWS,), IGNORED), reduction="none")
    assert loss.tolist() == [0.0] * ROWS


@pytest.mark.parametrize("bounds", [[0, 12], [0, 2, 12], [0, 6, 6, 12], [0, 11, 12]])
def test_the_highest_entries_of_all_ranks_are_those_of_the_whole_row(bounds: list[int]) -> None:
    table = logits()
    table[0, 9] = 3.9  # torch promises no order of equal entries

    def on_rank(ranks: Ranks, start: int, stop: int) -> tuple[Tensor, Tensor]:
        values, ids = table[:, start:stop].topk(min(4, stop - start), 1)
        return top_k_over_ranks(values, ids + start, 4, ranks)

    expected = table.topk(4, 1)
    for values, ids in on_ranks(bounds, on_rank):
        assert values.tolist() == expected.values.tolist()
        assert ids.tolist() == expected.indices.tolist()


def test_entries_of_a_short_shard_are_not_outdone_by_its_missing_ones() -> None:
    def on_rank(ranks: Ranks, start: int, stop: int) -> tuple[Tensor, Tensor]:
        table = -torch.arange(1.0, 4.0)[None, start:stop]
        return top_k_over_ranks(table, torch.arange(start, stop)[None], 3, ranks)

    for values, ids in on_ranks([0, 1, 3], on_rank):
        assert values.tolist() == [[-1.0, -2.0, -3.0]]
        assert ids.tolist() == [[0, 1, 2]]
