"""Words that look random."""

from __future__ import annotations

import torch

from rft_models.keyed_masks.keyed_words import GOLDEN, mix, shift_right


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    # the first three outputs of the reference generator of Steele, Lea and Flood from the state 0
    states = torch.tensor([1, 2, 3]) * GOLDEN
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [word & (2**64 - 1) for word in mix(states).tolist()] == expected


def test_words_are_shifted_with_zeros_from_the_left() -> None:
    assert shift_right(torch.tensor([-1, 8]), 3).tolist() == [2**61 - 1, 1]
