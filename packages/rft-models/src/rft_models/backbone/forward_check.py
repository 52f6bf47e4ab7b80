"""Compare a forward computed here with the model's own, on two short segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft_core.errors import PreflightError
from rft_core.packed_tokens import PackedTokens

_PROBE_LENGTHS = (3, 5)


@dataclass(frozen=True, slots=True)
class Probe:
    """Short segments that a forward is tried on, apart and packed."""

    segments: list[Tensor]
    """[L] int64 token ids of each."""
    tokens: PackedTokens
    """The segments one after another, with the images of each."""

    @classmethod
    def of(cls, vocab_size: int, device: torch.device) -> Probe:
        """Build a probe with ids that differ between the segments, whatever the vocabulary."""
        segments = [
            (torch.arange(length, device=device) * 7 + 3 + start) % vocab_size
            for start, length in enumerate(_PROBE_LENGTHS)
        ]
        return cls(segments, PackedTokens.of_segments(segments, mm_inputs=[None] * len(segments)))

    @property
    def mm_inputs(self) -> Sequence[Any]:
        """The images of each segment, None for one of text alone."""
        assert self.tokens.mm_inputs is not None
        return self.tokens.mm_inputs


def require_equal_logits(expected: Tensor, actual: Tensor, *, of: str, dtype: torch.dtype, where: str) -> None:
    """Raise `PreflightError` where the two differ by more than weights of this dtype explain."""
    error, magnitude = difference(expected, actual), float(expected.abs().max()) + 1.0
    if not error <= tolerance(dtype):
        raise PreflightError(
            code="models.forward_differs",
            what=f"{of} differ from those of its own forward by {error * magnitude:.3g} of {magnitude:.3g}",
            where=where,
            why="the packed forward must equal the model's own; its head or attention does more than is known here",
            do="choose a model of one of the families in the README of rft-models",
        )


def difference(expected: Tensor, actual: Tensor) -> float:
    """Compute the largest difference over the largest expected number and one."""
    return float((expected - actual).abs().max()) / (float(expected.abs().max()) + 1.0)


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest `difference` allowed between two ways to compute with weights of this dtype."""
    return 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2
