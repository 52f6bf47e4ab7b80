"""Places and masks of the rows of a block, and the worth of a cut."""

from __future__ import annotations

import pytest
import torch

from rft_models.decode import row_groups
from rft_models.decode.kv_cache import StaticCache
from rft_models.decode.row_groups import as_scores, group_boundaries, group_rows, whole_block


def cache_of(lengths: list[int], copies: list[int], own: list[int] | None = None) -> StaticCache:
    cache = StaticCache(1, sum(copies), 1, 9, 1, dtype=torch.float16, device=torch.device("cpu"))
    cache.max_len = 10_000
    cache.append(torch.tensor(lengths), torch.tensor(copies))
    if own is not None:
        cache.own_lengths_B = torch.tensor(own)
    return cache


def test_rows_have_places_beside_those_of_the_prompt_with_most() -> None:
    block = whole_block(cache_of([2, 3, 1], [2, 3, 1]))
    assert (block.rows, block.prompts) == (slice(0, 6), slice(0, 3))
    assert (block.group_size, block.prompt_columns) == (3, 3)
    assert block.place_B is not None
    assert block.place_B.tolist() == [0, 1, 3, 4, 5, 6]
    assert block.prompt_mask is not None
    assert block.prompt_mask.dtype is torch.float16
    assert block.prompt_mask.shape == (6, 1, 3)
    shown = ["".join(".#"[place == 0] for place in row) for row in block.prompt_mask[:, 0].tolist()]
    assert shown == ["##.", "##.", "###", "###", "###", "#.."]
    assert set(block.prompt_mask.unique().tolist()) == {-torch.inf, 0.0}


def test_prompts_of_one_size_need_neither_places_nor_a_mask() -> None:
    block = whole_block(cache_of([4, 4], [2, 2]))
    assert (block.place_B, block.prompt_mask, block.group_size, block.prompt_columns) == (None, None, 2, 4)


def test_blocks_count_from_their_own_first_prompt_and_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(row_groups._WORTH, "cpu", 50)
    first, second = group_rows(cache_of([90, 2, 3], [2, 1, 2]), 1)
    assert (first.rows, first.prompts, first.prompt_columns, first.group_size) == (slice(0, 2), slice(0, 1), 90, 2)
    assert (first.place_B, first.prompt_mask) == (None, None)
    assert (second.rows, second.prompts, second.prompt_columns, second.group_size) == (slice(2, 5), slice(1, 3), 3, 2)
    assert second.place_B is not None
    assert second.place_B.tolist() == [0, 2, 3]
    assert second.prompt_mask is not None
    assert (second.prompt_mask[:, 0] == 0).tolist() == [[True, True, False], [True] * 3, [True] * 3]


@pytest.mark.parametrize(
    ("lengths", "copies", "own", "worth", "expected"),
    [
        ([10, 4], [1, 1], None, 6, [0, 1, 2]),  # 2 * 10 becomes 10 + 4
        ([10, 4], [1, 1], None, 7, [0, 2]),
        ([4, 4], [3, 1], None, 8, [0, 1, 2]),  # 2 * 3 * 4 becomes 3 * 4 + 4
        ([4, 4], [3, 1], None, 9, [0, 2]),
        ([4, 4], [2, 2], [1, 7, 0, 0], 14, [0, 1, 2]),  # 4 * 7 becomes 2 * 7
        ([4, 4], [2, 2], [1, 7, 0, 0], 15, [0, 2]),
        ([4, 4], [2, 2], [7, 1, 7, 7], 0, [0, 2]),  # a cut that saves nothing is none
        ([5, 4], [1, 1], None, 0, [0, 1, 2]),  # it saves one number
        ([5], [3], [1, 2, 3], 0, [0, 1]),
        ([90, 70, 50, 30, 10, 1], [1] * 6, None, 1, [0, 1, 2, 4, 6]),
        ([1, 10, 30, 50, 70, 90], [1] * 6, None, 1, [0, 2, 4, 5, 6]),
    ],
)
def test_rows_are_cut_where_it_saves_what_it_is_worth(
    lengths: list[int], copies: list[int], own: list[int] | None, worth: int, expected: list[int]
) -> None:
    found = group_boundaries(cache_of(lengths, copies, own), worth)
    if len(expected) < 5:
        assert found == expected
    else:
        assert len(found) == 5, "at most four blocks"


@pytest.mark.parametrize(("width", "cuts"), [(2**17, 1), (2**17 // 6, 1), (2**17 // 7, 0), (1, 0)])
def test_a_wide_query_makes_a_cut_worth_less(width: int, cuts: int) -> None:
    assert len(group_rows(cache_of([10, 4], [1, 1]), width)) == 1 + cuts


def test_hidden_places_are_minus_infinity_in_the_type_of_the_scores() -> None:
    found = as_scores(torch.tensor([[True, False]]), torch.empty(0, dtype=torch.bfloat16))
    assert (found.tolist(), found.dtype) == ([[[-torch.inf, 0.0]]], torch.bfloat16)
    assert as_scores(torch.tensor([[True, False]]), torch.empty(0, device="meta")).is_meta
