"""Groups of rows of a `StaticCache` that share one attention call, cut where padding costs more than a call.

The attention of a block of rows is computed over as many columns as its longest prompt and its oldest row have, with
as many places for each prompt as the prompt with most samples needs. Rows that were begun long ago, or go on behind
what they had drawn before, would make all others pay for their length:

    prompt 0   ########################          one block: 4 x 1 x 24 columns
    prompt 1   #################                 blocks {0, 1}, {2, 3}: 2 x 24 + 2 x 4
    prompt 2   ####
    prompt 3   ###

Shape letters: P prompts, B rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rft_models.decode.kv_cache import StaticCache

_MOST_BLOCKS = 4
_WORTH = {"cpu": 2**17}
"""Numbers that a cut must save in each of the products of a layer: what another dozen small operations cost.

Measured on a CPU, where a product does some 15 of them a nanosecond."""
_WORTH_ELSEWHERE = 2**25


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of neighbouring prompts that share one attention call."""

    rows: slice
    prompts: slice
    prompt_columns: int
    """Tokens of the longest prompt."""
    group_size: int
    """Rows of the prompt that has most of them."""
    place_B: Tensor | None
    """Place of each row in [P, group_size] of the block; None where every prompt has `group_size` rows."""
    prompt_mask: Tensor | None
    """[B, 1, prompt_columns], -inf behind the prompt of each row and 0 elsewhere; None where all have one length."""


def whole_block(cache: StaticCache) -> RowBlock:
    """Return one block of all rows, whatever the padding."""
    return _block(cache, 0, cache.prompt_lengths_P.shape[0])


def group_rows(cache: StaticCache, width: int) -> list[RowBlock]:
    """Group the rows into at most four blocks, in order; the same ones until the rows change.

    Args:
        cache: with at least one row.
        width: numbers of a query, all heads together.
    """
    layout, blocks = cache.blocks
    if layout != cache.layout:
        bounds = group_boundaries(cache, _WORTH.get(cache.keys[0].device.type, _WORTH_ELSEWHERE) // width)
        blocks = [_block(cache, first, last) for first, last in pairwise(bounds)]
        cache.blocks = (cache.layout, blocks)
    return blocks


def group_boundaries(cache: StaticCache, worth: int) -> list[int]:
    """Numbers of prompts between which blocks begin and end, 0 and P among them.

    The cost of a block is prompts x places x columns of the prompts + rows x columns of their own; a cut that saves
    less than `worth` is not made.
    """
    num_prompts = cache.prompt_lengths_P.shape[0]
    rows_P = torch.bincount(cache.prompt_of_row_B, minlength=num_prompts)
    own_P = torch.zeros(num_prompts, dtype=torch.int64)
    own_P.scatter_reduce_(0, cache.prompt_of_row_B, cache.own_lengths_B, "amax")
    sizes = (cache.prompt_lengths_P, rows_P, own_P)
    bounds = [0, num_prompts]
    # greedily: the best cut of all blocks so far, until none is worth its operations
    while len(bounds) <= _MOST_BLOCKS:
        cuts = [_best_cut([part[a:b] for part in sizes]) for a, b in pairwise(bounds)]
        saved, boundary = max((saved, bounds[i] + cut) for i, (saved, cut) in enumerate(cuts))
        if saved < max(worth, 1):
            break
        bounds = sorted([*bounds, boundary])
    return bounds


def _best_cut(sizes: list[Tensor]) -> tuple[int, int]:
    """(what it saves, prompts before it) of the best cut of these prompts; (0, 0) where there is none."""
    if sizes[0].shape[0] < 2:
        return 0, 0
    # the costs of all beginnings and of all ends, so that every cut is judged in a few operations
    before, after = _costs(sizes), _costs([part.flip(0) for part in sizes]).flip(0)
    saved = before[-1] - (before[:-1] + after[1:])
    best = int(saved.argmax())
    return int(saved[best]), best + 1


def _costs(sizes: list[Tensor]) -> Tensor:
    """Return the costs [P] of a block of the first 1, 2, ... prompts with these lengths, rows and oldest rows."""
    longest, max_rows, oldest = (part.cummax(0).values for part in sizes)
    prompts = torch.arange(1, longest.shape[0] + 1)
    return prompts * max_rows * longest + sizes[1].cumsum(0) * oldest


def _block(cache: StaticCache, first: int, last: int) -> RowBlock:
    start, end = torch.searchsorted(cache.prompt_of_row_B, torch.tensor([first, last])).tolist()
    own_prompt_B = cache.prompt_of_row_B[start:end] - first
    counts_P = torch.bincount(own_prompt_B)
    group_size = int(counts_P.max())
    place_B = None
    if int(counts_P.min()) < group_size:
        # prompts with fewer rows leave places empty: zeros there, which no row reads back
        first_P = counts_P.cumsum(0) - counts_P
        rank_B = torch.arange(end - start) - first_P[own_prompt_B]
        place_B = (own_prompt_B * group_size + rank_B).to(cache.keys[0].device)
    lengths_P = cache.prompt_lengths_P[first:last]
    columns, mask = int(lengths_P.max()), None
    if int(lengths_P.min()) < columns:
        hidden_BC = torch.arange(columns) >= lengths_P[own_prompt_B, None]
        mask = as_scores(hidden_BC, cache.keys[0])
    return RowBlock(slice(start, end), slice(first, last), columns, group_size, place_B, mask)


def as_scores(hidden_BC: Tensor, like: Tensor) -> Tensor:
    """[B, 1, C]: what is added to scores, -inf where hidden and 0 elsewhere."""
    mask = torch.zeros(hidden_BC.shape, dtype=like.dtype, device=hidden_BC.device)
    return mask.masked_fill_(hidden_BC, -torch.inf)[:, None].to(like.device)
