"""Blocks of segments of similar length, masks, and the choice between kernel and blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rft_models.attention.packed import (
    AttentionBlock,
    PackedLayout,
    attend,
    kernel_takes,
    packed_attention,
    softcapped_attention,
    to_block,
)
from rft_models.attention.varlen import Piece

CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_a_mask_shows_a_token_itself_and_what_its_window_reaches() -> None:
    block = AttentionBlock(2, 3, None)
    assert block.mask_LL(None, CPU).tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert block.mask_LL(2, CPU).tolist() == [[True, False, False], [True, True, False], [False, True, True]]
    assert block.mask_LL(1, CPU).tolist() == torch.eye(3, dtype=torch.bool).tolist()
    assert block.mask_LL(2, CPU) is block.mask_LL(2, CPU), "every layer has the same mask"


def test_segments_of_one_length_are_a_view_and_others_are_gathered_longest_first() -> None:
    even = PackedLayout.from_lengths((3, 3))
    assert (even.num_tokens, even.lengths, even.starts, even.scatter_T) == (6, (3, 3), (0, 3), None)
    assert [(block.num_segments, block.length, block.gather_SL) for block in even.blocks] == [(2, 3, None)]
    ragged = PackedLayout.from_lengths((2, 3, 1))
    assert (ragged.num_tokens, ragged.starts) == (6, (0, 2, 5))
    first, *rest = ragged.blocks
    assert rest == []
    assert (first.num_segments, first.length) == (3, 3)
    assert first.gather_SL is not None
    assert first.gather_SL.tolist() == [2, 3, 4, 0, 1, 0, 5, 0, 0], "padding repeats the row's first token"
    assert ragged.scatter_T is not None
    assert ragged.scatter_T.tolist() == [3, 4, 0, 1, 2, 6]


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((4, 2), [(2, 4)]),  # 8 places for 6 tokens
        ((4, 2, 2), [(3, 4)]),  # 12 for 8: just half as many again
        ((6, 2, 2), [(2, 6), (1, 2)]),  # 12 for 8, then 18 for 10
        ((5, 1), [(1, 5), (1, 1)]),
        ((1, 5, 1, 5), [(3, 5), (1, 1)]),  # 15 for 11, then 20 for 12
        ((7,), [(1, 7)]),
        ((), []),
    ],
)
def test_a_block_is_padded_by_half_at_most(lengths: tuple[int, ...], sizes: list[tuple[int, int]]) -> None:
    layout = PackedLayout.from_lengths(lengths)
    assert [(block.num_segments, block.length) for block in layout.blocks] == sizes


@pytest.mark.parametrize(
    ("lengths", "threads", "sizes"),
    [
        ((100, 90, 89), 1, [(2, 100), (1, 89)]),  # 90 adds 1,900 entries and 89 2,079, of 2,048 that are allowed
        ((100, 90, 89), 2, [(3, 100)]),
        ((321, 250, 180, 150), 1, [(1, 321), (1, 250), (1, 180), (1, 150)]),
        ((64, 60, 50, 48), 1, [(4, 64)]),
    ],
)
def test_on_a_cpu_padding_of_a_block_costs_less_than_another_block(
    lengths: tuple[int, ...], threads: int, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layout = PackedLayout.from_lengths(lengths)
    assert [(block.num_segments, block.length) for block in layout.blocks] == sizes
    assert [block.num_segments for block in PackedLayout.from_lengths(lengths, "meta").blocks] == [len(lengths)]


def test_a_segment_ends_where_the_number_changes() -> None:
    layout = PackedLayout.from_segment_ids(torch.tensor([7, 7, 3, 7, 7, 7]))
    assert (layout.num_tokens, layout.lengths, layout.starts) == (6, (2, 1, 3), (0, 2, 3))
    assert layout.pieces() == [Piece(0, 2), Piece(2, 1), Piece(3, 3)]
    empty = PackedLayout.from_segment_ids(torch.empty(0, dtype=torch.int64))
    assert (empty.num_tokens, empty.lengths, empty.starts, empty.blocks, empty.scatter_T) == (0, (), (), [], None)


def test_rows_of_a_block_are_segments_with_their_heads_before_their_tokens() -> None:
    layout, tensor = PackedLayout.from_lengths((1, 2)), torch.arange(6.0).view(3, 2, 1)
    [block] = layout.blocks
    assert to_block(tensor, block)[..., 0].tolist() == [[[2.0, 4.0], [3.0, 5.0]], [[0.0, 0.0], [1.0, 1.0]]]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [(3, 3), (4, 1, 3)])
def test_a_window_reaches_as_far_as_it_says_and_no_further(lengths: tuple[int, ...], window: int | None) -> None:
    size = sum(lengths)
    query, key, value = drawn(size, 4, 6), drawn(size, 2, 6, seed=1), drawn(size, 2, 5, seed=2)
    layout = PackedLayout.from_lengths(lengths)
    found = packed_attention(query, key, value, layout, scaling=0.3, sliding_window=window)
    assert found.shape == (size, 4, 5), "values may be narrower than keys"
    for start, length in zip(layout.starts, lengths, strict=True):
        for token in range(start, start + length):
            first = start if window is None else max(start, token + 1 - window)
            for head in range(4):
                scores = 0.3 * key[first : token + 1, head // 2] @ query[token, head]
                expected = scores.softmax(0) @ value[first : token + 1, head // 2]
                torch.testing.assert_close(found[token, head], expected, atol=1e-12, rtol=0)


def test_written_out_attention_is_the_fused_one_where_nothing_is_capped() -> None:
    query, key, value = drawn(2, 4, 3, 6), drawn(2, 2, 3, 6, seed=1), drawn(2, 2, 3, 6, seed=2)
    mask = AttentionBlock(2, 3, None).mask_LL(None, CPU)
    fused = attend(query, key, value, None, scaling=0.3, softcap=None, dropout=0.0)
    torch.testing.assert_close(attend(query, key, value, mask, scaling=0.3, softcap=None, dropout=0.0), fused)
    torch.testing.assert_close(softcapped_attention(query, key, value, mask, scaling=0.3, softcap=None), fused)
    wide = attend(query, key, value, mask, scaling=0.3, softcap=1e6, dropout=0.0)
    torch.testing.assert_close(wide, fused, atol=1e-9, rtol=0)
    assert not torch.allclose(attend(query, key, value, mask, scaling=0.3, softcap=0.2, dropout=0.0), fused)
    everything = softcapped_attention(query, key, value, None, scaling=0.3, softcap=None)
    torch.testing.assert_close(everything[:, :, -1], fused[:, :, -1])
    assert not torch.allclose(everything[:, :, 0], fused[:, :, 0])


def test_written_out_weights_are_normalised_in_float32_and_a_row_that_sees_nothing_stays_finite() -> None:
    query, key, value = (drawn(1, 1, 3, 8, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    found = softcapped_attention(query, key, value, mask, scaling=0.3, softcap=2.0)
    assert found.dtype is torch.bfloat16
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found[0, 0, 0], value[0, 0, 0])
    scores = 2.0 * torch.tanh((query @ key.transpose(2, 3)) * 0.3 / 2.0)
    weights = scores[0, 0, 2].float().softmax(0).bfloat16()
    assert torch.equal(found[0, 0, 2], weights @ value[0, 0])


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_dropout_draws_weights_away_and_scales_the_others(softcap: float | None) -> None:
    query, key, value = drawn(1, 1, 1, 4), drawn(1, 1, 200, 4, seed=1) * 0, torch.ones(1, 1, 200, 1).double()
    mask = torch.ones(1, 200, dtype=torch.bool)
    settings: dict[str, Any] = {"scaling": 1.0, "softcap": softcap}
    whole = attend(query, key, value, mask, **settings, dropout=0.0)
    assert whole.item() == pytest.approx(1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dropped = attend(query, key, value, mask, **settings, dropout=0.5)
    kept = round(dropped.item() * 200 / 2)
    assert dropped.item() == pytest.approx(2 * kept / 200)
    assert 60 < kept < 140


class Kernel:
    """Takes what is neither capped nor dropped, and notes its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def takes(self, query_THD: Tensor, value_SGD: Tensor, *, softcap: float | None, dropout: float) -> bool:
        self.asked.append((softcap, dropout))
        return softcap is None and dropout == 0.0

    def __call__(self, query_THD: Tensor, key: Tensor, value: Tensor, sequences: Any, **settings: Any) -> Tensor:
        self.calls.append((sequences, settings))
        return torch.zeros_like(query_THD)


def test_a_kernel_is_asked_with_what_it_may_not_take() -> None:
    kernel: Any = Kernel()
    query, value, nothing = torch.ones(2, 1, 4), torch.ones(2, 1, 4), torch.ones(0, 1, 4)
    assert not kernel_takes(None, query, value, {})
    assert not kernel_takes(kernel, nothing, nothing, {}), "there is nothing to compute"
    assert kernel.asked == []
    assert kernel_takes(kernel, query, value, {})
    assert kernel_takes(kernel, query, value, {"softcap": None, "dropout": None})
    assert not kernel_takes(kernel, query, value, {"softcap": 2.0})
    assert not kernel_takes(kernel, query, value, {"dropout": 0.5})
    assert kernel.asked == [(None, 0.0), (None, 0.0), (2.0, 0.0), (None, 0.5)]


def test_a_kernel_has_all_segments_in_one_call_and_their_places_are_made_once() -> None:
    kernel: Any = Kernel()
    layout = PackedLayout.from_lengths((1, 2))
    given = (drawn(3, 2, 4), drawn(3, 1, 4, seed=1), drawn(3, 1, 4, seed=2))
    settings: dict[str, Any] = {"scaling": 0.3, "sliding_window": None, "softcap": None, "dropout": 0.0}
    computed = layout.attend(*given, **settings)
    assert torch.equal(computed, packed_attention(*given, layout, **settings))
    layout.kernel = kernel
    for _ in range(2):
        assert not layout.attend(*given, **settings).any()
    assert kernel.calls[0][0] is kernel.calls[1][0] is layout.sequences
    assert [call[1] for call in kernel.calls] == [settings] * 2
    capped = layout.attend(*given, **(settings | {"softcap": 3.0}))
    assert torch.equal(capped, packed_attention(*given, layout, scaling=0.3, softcap=3.0))
    assert len(kernel.calls) == 2
