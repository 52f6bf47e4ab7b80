from __future__ import annotations

import torch

from rft_core.packed_tokens import AllowedTokens, PackedTokens

SEGMENTS = [torch.tensor([7, 8, 9]), torch.tensor([5]), torch.tensor([6, 6])]


def test_segments_are_concatenated_with_positions_and_ids_of_their_own() -> None:
    tokens = PackedTokens.of_segments(SEGMENTS, mm_inputs=("image", None, None))
    assert tokens.token_ids_T.tolist() == [7, 8, 9, 5, 6, 6]
    assert tokens.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert tokens.segment_ids_T.tolist() == [0, 0, 0, 1, 2, 2]
    assert tokens.num_tokens == 6
    assert tokens.mm_inputs == ("image", None, None)


def test_without_a_mask_every_token_with_a_predecessor_is_a_target() -> None:
    tokens = PackedTokens.of_segments(SEGMENTS)
    assert tokens.predictable_T.tolist() == [False, True, True, False, False, True]
    assert torch.equal(tokens.targets_T, tokens.predictable_T)


def test_a_masked_first_token_is_no_target_either() -> None:
    packed = PackedTokens.of_segments(SEGMENTS)
    mask_T = torch.tensor([1, 0, 1, 1, 1, 0])
    tokens = PackedTokens(packed.token_ids_T, packed.positions_T, packed.segment_ids_T, mask_T)
    assert tokens.targets_T.tolist() == [False, False, True, False, False, False]


def test_allowed_tokens_of_some_targets_keep_their_sets() -> None:
    allowed = AllowedTokens(torch.tensor([7, 8, 9, 1, 2, 3]), torch.tensor([2, 1, 3]))
    found = allowed.of_rows(torch.tensor([2, 0]))
    assert found.ids_E.tolist() == [1, 2, 3, 7, 8]
    assert found.counts_R.tolist() == [3, 2]
    everything = allowed.of_rows(torch.arange(3))
    assert everything.ids_E.tolist() == allowed.ids_E.tolist()
    assert allowed.of_rows(torch.zeros(0, dtype=torch.int64)).ids_E.tolist() == []
