"""Segment ids made from lengths, whose sequences are known to be contiguous without reading the ids again.

A function of sequences has to find where each begins and ends, for which it reads 8 bytes a token, on a CPU more than
half of its time. Ids that `packed_segment_ids` made are remembered with their runs as long as the tensor lives and
torch has not written to it; any other tensor of ids is read.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rft_algos.input_checks import refuse
from rft_algos.packed.tensor_checks import check_group_ids, check_vectors
from rft_algos.packed.tracing import is_traced


@dataclass(frozen=True, slots=True)
class Runs:
    """Stretches of tokens of one id, in the order of the tokens."""

    ids_R: Tensor
    """[R] int64 id of each stretch."""
    lengths_R: Tensor
    """[R] int64 tokens of each stretch, at least 1."""


_known: MutableMapping[Tensor, tuple[int, Runs]] = WeakTensorKeyDictionary()
"""(version, runs) of each living tensor of ids."""


def packed_segment_ids(lengths_N: Tensor) -> Tensor:
    """Segment ids of N sequences that lie one after another: 0 for each token of the first, then 1, and so on.

    On a CPU the functions of `rft_algos` that are given this very tensor know its sequences without reading it. A
    change in place by torch is noticed, and the ids are then read as those of any tensor; a change through memory that
    numpy shares is not, so make a `clone` for that.

    Args:
        lengths_N: [N] integers, tokens of each sequence, 0 or more.

    Returns:
        [T] int64 on the device of the lengths, T their sum. Example: lengths 2, 0, 1 give 0, 0, 2.
    """
    check_group_ids(lengths_N=lengths_N)
    check_vectors(lengths_N=lengths_N)
    lengths_N = lengths_N.to(torch.int64)
    on_cpu = lengths_N.is_cpu
    if on_cpu and lengths_N.numel() and int(lengths_N.min()) < 0:
        refuse(f"lengths_N must be 0 or more, the least is {int(lengths_N.min())}")
    numbers_N = torch.arange(lengths_N.shape[0], device=lengths_N.device)
    segment_ids_T = numbers_N.repeat_interleave(lengths_N)
    # a tensor of inference mode has no version, by which a change could be noticed
    if on_cpu and not segment_ids_T.is_inference():
        not_empty_N = lengths_N > 0
        _known[segment_ids_T] = segment_ids_T._version, Runs(numbers_N[not_empty_N], lengths_N[not_empty_N])
    return segment_ids_T


def known_runs(segment_ids_T: Tensor) -> Runs | None:
    """Return the runs of ids that `packed_segment_ids` made and nobody changed; None for others and while tracing.

    Args:
        segment_ids_T: [T] int64.
    """
    if is_traced():
        return None
    found = _known.get(segment_ids_T)
    return found[1] if found is not None and found[0] == segment_ids_T._version else None
