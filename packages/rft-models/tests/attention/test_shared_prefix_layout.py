"""The layout of a row without repeated prompts: what each token attends to, and what a kernel is told of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rft_models.attention.shared_prefix import SharedPrompts, find_shared_prefixes
from rft_models.attention.varlen import Piece

# (prompt number, prompt length, response length): two groups of one shape, a ragged one, and segments between them
ROWS = ((0, 4, 2), (0, 4, 2), (1, 3, 2), (2, 5, 1), (2, 5, 3), (3, 4, 2), (3, 4, 2), (4, 2, 4))
LENGTHS = [prompt + own for _, prompt, own in ROWS]
HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def shared_of(rows: tuple[tuple[int, int, int], ...] = ROWS) -> SharedPrompts | None:
    tokens = [[100 * number + place for place in range(prompt)] + [-1] * own for number, prompt, own in rows]
    positions = torch.cat([torch.arange(len(part)) for part in tokens])
    segments = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(part) for part in tokens]))
    wanted = positions >= torch.tensor([prompt for _, prompt, _ in rows])[segments]
    return find_shared_prefixes(torch.tensor([i for part in tokens for i in part]), positions, segments, wanted)


def shared() -> SharedPrompts:
    found = shared_of()
    assert found is not None
    return found


def dense(query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, window: int | None, softcap: float | None) -> Tensor:
    """Every segment of the whole row by itself, token by token."""
    outputs: list[Tensor] = []
    begin = 0
    for length in LENGTHS:
        for place in range(begin, begin + length):
            first = begin if window is None else max(begin, place + 1 - window)
            for head in range(HEADS):
                keys, values = (x[first : place + 1, head * KEY_HEADS // HEADS] for x in (key_TGD, value_TGD))
                scores = 0.3 * keys @ query_THD[place, head]
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                outputs.append(scores.softmax(0) @ values)
        begin += length
    return torch.stack(outputs).view(query_THD.shape)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 5, 6, 7, 8, 100])
def test_every_token_attends_to_its_prompt_and_its_own_as_if_nothing_were_shared(
    window: int | None, softcap: float | None
) -> None:
    found, generator = shared(), torch.Generator().manual_seed(2)
    shapes = ((HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, WIDTH))
    given = [torch.randn(len(found.kept_K), *s, generator=generator, dtype=torch.float64) for s in shapes]
    settings: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "softcap": softcap}
    attended_K = found.layout.attend(*given, **settings)
    query_THD, key_TGD, value_TGD = (tensor[found.place_T] for tensor in given)
    expected_T = dense(query_THD, key_TGD, value_TGD, window, softcap)
    torch.testing.assert_close(attended_K[found.place_T], expected_T, atol=1e-12, rtol=0)
    again_K = found.layout.attend(*given, **settings)
    assert torch.equal(again_K, attended_K), "masks that are kept are those of the first layer"


def test_prompts_and_segments_that_share_nothing_come_before_the_responses() -> None:
    found = shared()
    assert found.layout.common.lengths == (4, 5, 5, 4, 6)
    starts = [0, 6, 12, 17, 23, 31, 37, 43]
    expected = [*range(4), *range(12, 17), *range(17, 22), *range(31, 35), *range(43, 49)]
    for number in (0, 1, 3, 4, 5, 6):
        _, prompt, own = ROWS[number]
        expected += range(starts[number] + prompt, starts[number] + prompt + own)
    assert found.kept_K.tolist() == expected


PIECES = [Piece(24, 2, 0, 4), Piece(26, 2, 0, 4), Piece(28, 1, 9, 5), Piece(29, 3, 9, 5)]
PIECES += [Piece(32, 2, 14, 4), Piece(34, 2, 14, 4)]


def test_a_kernel_is_told_of_every_prompt_and_of_what_stands_before_each_response() -> None:
    common = [Piece(0, 4), Piece(4, 5), Piece(9, 5), Piece(14, 4), Piece(18, 6)]
    assert shared().layout.pieces() == [*common, *PIECES]


def test_responses_of_similar_shape_are_attended_to_in_one_call() -> None:
    [block] = shared().layout.blocks
    assert sorted(block.segments, key=lambda piece: piece.start) == PIECES
    found = shared_of(((0, 4, 90), (0, 4, 1), (1, 30, 1), (1, 30, 1), (1, 30, 2)))
    assert found is not None
    shapes = [[(piece.prefix_length, piece.length) for piece in block.segments] for block in found.layout.blocks]
    assert shapes == [[(4, 90)], [(30, 2), (30, 1), (30, 1), (4, 1)]]


def test_responses_of_one_length_in_the_order_of_the_row_are_viewed_as_the_block() -> None:
    found = shared_of(((0, 4, 3), (0, 4, 3), (1, 4, 3), (1, 4, 3)))
    assert found is not None
    [block] = found.layout.blocks
    assert (block.query_SL, found.layout.scatter_R) == (None, None)
    assert block.mask(None, torch.device("cpu")).shape == (3, 7)


class Kernel:
    """Takes every call, and notes it."""

    def __init__(self) -> None:
        self.sequences: list[Any] = []
        self.settings: list[dict[str, Any]] = []

    def takes(self, query_THD: Tensor, value_SGD: Tensor, *, softcap: float | None, dropout: float) -> bool:
        return softcap is None

    def __call__(
        self, query_THD: Tensor, key_SGD: Tensor, value_SGD: Tensor, sequences: Any, **settings: Any
    ) -> Tensor:
        self.sequences.append(sequences)
        self.settings.append(settings)
        return torch.zeros_like(query_THD)


def test_a_kernel_takes_all_parts_in_one_call_with_sequences_that_are_made_once() -> None:
    found, kernel = shared(), Kernel()
    taking: Any = kernel
    found.layout.kernel = taking
    size = len(found.kept_K)
    given = (torch.ones(size, HEADS, WIDTH), torch.ones(size, KEY_HEADS, WIDTH), torch.ones(size, KEY_HEADS, WIDTH))
    settings: dict[str, Any] = {"scaling": 0.3, "sliding_window": 3, "softcap": None, "dropout": 0.0}
    for _ in range(2):
        assert not found.layout.attend(*given, **settings).any()
    assert kernel.settings == [settings] * 2
    assert kernel.sequences[0] is kernel.sequences[1]
    assert bool(found.layout.attend(*given, **(settings | {"softcap": 2.0})).any()), "what it does not take is computed"
    assert len(kernel.settings) == 2


def test_layers_share_the_masks_of_windows_that_hide_nothing() -> None:
    found = shared_of(((0, 4, 2), (0, 4, 2)))
    assert found is not None
    [block] = found.layout.blocks
    cpu = torch.device("cpu")
    plain = block.mask(None, cpu)
    assert plain.tolist() == [[True] * 5 + [False], [True] * 6]
    assert block.mask(6, cpu) is plain
    narrow = block.mask(5, cpu)
    assert narrow.tolist() == [[True] * 5 + [False], [False] + [True] * 5]
    assert block.mask(5, cpu) is narrow


def test_prompts_of_several_lengths_have_a_mask_for_each_segment() -> None:
    [block] = shared().layout.blocks
    mask = block.mask(None, torch.device("cpu"))
    assert mask.shape == (6, 1, 3, 8)
    for piece, seen_LC in zip(block.segments, mask[:, 0], strict=True):
        assert seen_LC.sum(1).tolist() == [min(piece.prefix_length + place + 1, 8) for place in range(3)]


@pytest.mark.parametrize(("own", "is_shared"), [(6, True), (7, False)])
def test_an_eighth_of_the_tokens_must_be_repetition(own: int, is_shared: bool) -> None:
    assert (shared_of(((0, 2, own), (0, 2, own))) is not None) == is_shared


def test_a_prompt_comes_again_behind_another_one_as_a_group_of_its_own() -> None:
    found = shared_of(((0, 4, 1), (0, 4, 1), (1, 4, 1), (0, 4, 1)))
    assert found is not None
    assert len(found.kept_K) == 4 + 2 + 5 + 5
    assert shared_of(((0, 4, 1), (1, 4, 1), (0, 4, 1))) is None
