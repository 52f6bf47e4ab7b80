"""Words that look random, from words that say what they are for, on any device: int64 and SplitMix64's finaliser."""

from __future__ import annotations

from torch import Tensor

GOLDEN = -7046029254386353131
"""0x9E3779B97F4A7C15 as a signed integer: odd, its bits look random."""
_MIXERS = (-4658895280553007687, -7723592293110705685)
"""Multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""


def mix(words: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 words: every bit of the input changes about half of the output's."""
    words = (words ^ shift_right(words, 30)) * _MIXERS[0]
    words = (words ^ shift_right(words, 27)) * _MIXERS[1]
    return words ^ shift_right(words, 31)


def shift_right(words: Tensor, by: int) -> Tensor:
    """Shift words to the right, with zeros from the left."""
    return (words >> by) & ((1 << (64 - by)) - 1)
