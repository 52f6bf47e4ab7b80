"""Where rows are cut into blocks, held against a search over all cuts."""

from __future__ import annotations

import itertools

import pytest
import torch

from rft_models.decode.kv_cache import StaticCache
from rft_models.decode.row_groups import group_boundaries, group_rows, whole_block


def cache_of(lengths: list[int], copies: list[int], own: list[int]) -> StaticCache:
    """Rows of prompts with these lengths, the oldest of each with `own[p]` tokens."""
    cache = StaticCache(
        1, sum(copies), 1, max(lengths) + max(own) + 1, 1, dtype=torch.float32, device=torch.device("cpu")
    )
    cache.append(torch.tensor(lengths), torch.tensor(copies))
    cache.write_prompts(0, *(torch.zeros(len(lengths), 1, max(lengths), 1) for _ in range(2)))
    tokens = [age if row == 0 else age // 2 for age, num in zip(own, copies, strict=True) for row in range(num)]
    cache.own_lengths_B = torch.tensor(tokens)
    return cache


def cost(lengths: list[int], copies: list[int], own: list[int], bounds: tuple[int, ...]) -> int:
    """Of the blocks between these numbers of prompts."""
    total = 0
    for first, last in itertools.pairwise(bounds):
        total += (last - first) * max(copies[first:last]) * max(lengths[first:last])
        total += sum(copies[first:last]) * max(own[first:last])
    return total


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_saves_most_and_none_is_made_that_saves_too_little(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num = int(torch.randint(1, 9, (), generator=generator))
    lengths = torch.randint(1, 60, (num,), generator=generator).tolist()
    copies = torch.randint(1, 5, (num,), generator=generator).tolist()
    own = torch.randint(0, 40, (num,), generator=generator).tolist()
    worth = 50
    found = group_boundaries(cache_of(lengths, copies, own), worth)
    assert (found[0], found[-1]) == (0, num)
    assert found == sorted(set(found))
    assert len(found) <= 5
    whole = cost(lengths, copies, own, (0, num))
    best = min((cost(lengths, copies, own, (0, cut, num)) for cut in range(1, num)), default=whole)
    assert (len(found) > 2) == (whole - best >= worth)
    assert cost(lengths, copies, own, tuple(found)) <= min(best, whole) or len(found) == 2
    for left in found[1:-1]:  # each of them is worth its call
        without = tuple(place for place in found if place != left)
        assert cost(lengths, copies, own, without) - cost(lengths, copies, own, tuple(found)) > 0


def test_prompts_of_one_length_and_age_stay_together() -> None:
    assert group_boundaries(cache_of([9] * 6, [4] * 6, [3] * 6), 1) == [0, 6]


def test_blocks_are_made_again_when_rows_change_and_only_then() -> None:
    cache = cache_of([500, 4, 4], [1, 4, 2], [0, 0, 0])
    blocks = group_rows(cache, 64)
    assert [(block.rows, block.prompts) for block in blocks] == [(slice(0, 1), slice(0, 1)), (slice(1, 7), slice(1, 3))]
    assert blocks[0].place_B is None
    assert blocks[1].place_B is not None
    assert blocks[1].place_B.tolist() == [0, 1, 2, 3, 4, 5]
    cache.own_lengths_B = cache.own_lengths_B + 1
    assert group_rows(cache, 64) is blocks
    cache.keep(torch.tensor([0, 1, 2, 5]))
    blocks = group_rows(cache, 64)
    assert [block.rows for block in blocks] == [slice(0, 1), slice(1, 4)]
    assert blocks[1].place_B is not None
    assert blocks[1].place_B.tolist() == [0, 1, 2]
    cache.keep(torch.tensor([1, 2, 3]))
    assert [block.rows for block in group_rows(cache, 64)] == [slice(0, 3)]


def test_few_numbers_are_not_worth_a_cut() -> None:
    cache = cache_of([30, 4], [1, 4], [0, 0])
    [block] = group_rows(cache, 64)
    assert (block.rows, block.prompts, block.group_size) == (slice(0, 5), slice(0, 2), 4)
    assert whole_block(cache).prompt_columns == block.prompt_columns == 30
