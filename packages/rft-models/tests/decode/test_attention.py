"""Attention of a step over a cache of prompts and own tokens, against each row and head alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rft_models.decode import attention
from rft_models.decode.attention import StepAttention, hidden_columns
from rft_models.decode.kv_cache import StaticCache
from rft_models.decode.row_groups import group_rows, whole_block

KV_HEADS, HEADS, WIDTH, SCALING = 2, 6, 3, 0.7
LENGTHS, COPIES = [9, 2, 2, 5], [1, 3, 1, 2]
RAGGED, EVEN = [2, 0, 4, 1, 3, 3, 0], [2] * 7


def filled_cache(own: list[int], layers: int = 2, dtype: torch.dtype = torch.float64) -> StaticCache:
    """Every place has a value, so that one which is not hidden is seen."""
    generator = torch.Generator().manual_seed(4)
    length = max(own) + 1
    cache = StaticCache(layers, 7, KV_HEADS, max(length, 9), WIDTH, dtype=dtype, device=torch.device("cpu"))
    cache.append(torch.tensor(LENGTHS), torch.tensor(COPIES))
    for layer in range(layers):
        cache.write_prompts(
            layer, *(torch.randn(4, KV_HEADS, 9, WIDTH, generator=generator).to(dtype) for _ in range(2))
        )
        for store in (cache.keys[layer], cache.values[layer]):
            store.copy_(torch.randn(store.shape, generator=generator))
        # a full cache: no column is behind the newest token of the oldest row
        cache.keys[layer], cache.values[layer] = cache.keys[layer][:, :, :length], cache.values[layer][:, :, :length]
    cache.own_lengths_B = torch.tensor(own)
    return cache


def expected(cache: StaticCache, layer: int, query_BHD: Tensor, window: int | None) -> Tensor:
    rows: list[Tensor] = []
    for row, prompt in enumerate(cache.prompt_of_row_B.tolist()):
        length, own = LENGTHS[prompt], int(cache.own_lengths_B[row]) + 1
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            keys, values = (
                torch.cat([prompts[layer][prompt, shared, :length], owned[layer][row, shared, :own]])
                for prompts, owned in ((cache.prompt_keys, cache.keys), (cache.prompt_values, cache.values))
            )
            seen = slice(0 if window is None else max(0, length + own - window), None)
            weights = torch.softmax(SCALING * keys[seen] @ query_BHD[row, head], 0)
            rows.append(weights @ values[seen])
    return torch.stack(rows).view(query_BHD.shape[0], -1)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 13, 14, 100])
@pytest.mark.parametrize("own", [RAGGED, EVEN])
@pytest.mark.parametrize("cut", [False, True])
def test_a_step_attends_as_each_row_and_head_does_alone(own: list[int], window: int | None, cut: bool) -> None:
    layers = 1 if cut else 2
    cache = filled_cache(own, layers)
    blocks = group_rows(cache, 2**17) if cut else [whole_block(cache)]
    assert (len(blocks) > 1) == cut
    step = StepAttention(cache, KV_HEADS, SCALING, blocks)
    query = torch.randn(7, HEADS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for layer in range(layers):
        for each in (window, None, window):
            found = step(layer, query, each)
            torch.testing.assert_close(found, expected(cache, layer, query, each))


def test_prompts_of_one_length_and_rows_of_one_age_need_no_mask() -> None:
    cache = filled_cache(EVEN, layers=1)
    cache.keep(torch.tensor([1, 2, 3, 4]))
    step = StepAttention(cache, KV_HEADS, SCALING, [whole_block(cache)])
    assert whole_block(cache).prompt_mask is None
    query = torch.randn(4, HEADS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "LENGTHS", [2, 2])
        torch.testing.assert_close(step(0, query, None), expected(cache, 0, query, None))


def test_rows_in_two_blocks_are_those_of_one() -> None:
    cache = filled_cache(RAGGED)
    cache.keep(torch.tensor([0, 1, 2, 3]))
    blocks = group_rows(cache, 2**17)
    assert len(blocks) == 2
    query = torch.randn(4, HEADS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = StepAttention(cache, KV_HEADS, SCALING, blocks)(0, query, 4)
    torch.testing.assert_close(found, StepAttention(cache, KV_HEADS, SCALING, [whole_block(cache)])(0, query, 4))


def test_rows_of_one_age_take_the_mask_that_was_made_when_rows_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled_cache(EVEN)
    step = StepAttention(cache, KV_HEADS, SCALING, [whole_block(cache)])
    query = torch.randn(7, HEADS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def never(*_: object) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(attention, "as_scores", never)
    torch.testing.assert_close(step(0, query, None), expected(cache, 0, query, None))
    with pytest.raises(AssertionError):
        step(0, query, 2)


def test_weights_are_computed_in_float32_at_least() -> None:
    cache = filled_cache(RAGGED, dtype=torch.bfloat16)
    query = torch.randn(7, HEADS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = StepAttention(cache, KV_HEADS, SCALING, [whole_block(cache)])(0, query, None)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected(cache, 0, query, None), atol=0.03, rtol=0.03)


def test_a_row_does_not_see_behind_its_prompt_behind_its_newest_token_nor_before_its_window() -> None:
    prompt_B1, own_B1 = torch.tensor([[3], [1], [3]]), torch.tensor([[0], [2], [1]])

    def seen(window: int | None) -> list[str]:
        hidden = hidden_columns(prompt_B1, own_B1, 3, 4, window)
        return ["".join(".#"[not place] for place in row) for row in hidden.tolist()]

    assert seen(None) == ["####...", "#..###.", "#####.."]
    assert seen(5) == ["####...", "#..###.", "#####.."]
    assert seen(3) == [".###...", "...###.", "..###.."]
    assert seen(1) == ["...#...", ".....#.", "....#.."]
    on_device = [tensor.to("meta") for tensor in (prompt_B1, own_B1)]
    assert hidden_columns(on_device[0], on_device[1], 3, 4, 2).is_meta
