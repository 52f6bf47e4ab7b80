"""Samples of one prompt in one packed row: the prompt's tokens run once, forward and backward.

A group of n samples of a prompt of P tokens with responses of R tokens packs n (P + R) tokens; the
n copies of the prompt have the same states at every layer, because a causal token sees what stands
before it and nothing else. Here they are one copy, P + n R tokens, whose keys and values all n
responses attend to; its gradient is the sum over the responses, as that of the n copies would be.
A prompt of 192 tokens with 8 responses of 64 is 704 rows of every matrix instead of 2048.

Nothing declares groups: neighbouring segments whose tokens before the first wanted one are equal,
positions included, are a group. What does not repeat runs as `packed_attention` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from rft_core.device_copies import to_device
from rft_models.attention.packed import (
    MAX_PADDING,
    PackedLayout,
    attend,
    kernel_takes,
    most_wasted_area,
    packed_attention,
)
from rft_models.attention.varlen import Piece, Sequences, VarlenKernel, varlen_attention

_LEAST_SAVING = 0.125
"""Share of the tokens that must be repetition: below it the groups' separate attention costs more than it saves."""

MASKED_CALLS = 4
"""Cost of a block of responses over that of a block of whole segments: it has a mask, and keys of its own."""


@dataclass(slots=True)
class ResponseBlock:
    """Responses, of any prompts, whose attention is one call: padded queries over padded columns."""

    segments: tuple[Piece, ...]
    query_SL: Tensor | None
    """[S * L] place of each query among the own tokens (a padded one repeats token 0); None: the tokens in order."""
    column_SC: Tensor
    """[S * C] token of the row in each column: the prompt's, the segment's own, then token 0 as padding."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """L, tokens of the longest response."""
        return max(piece.length for piece in self.segments)

    @property
    def num_columns(self) -> int:
        """C, columns of the longest segment."""
        return max(_num_columns(piece) for piece in self.segments)

    def mask(self, sliding_window: int | None, device: torch.device) -> Tensor:
        """[L, C] bool, or [S, 1, L, C] where prompts differ in length: what own tokens see. Built once a forward."""
        # a window that spans all columns hides nothing and shares the mask without a window
        window = sliding_window if sliding_window is not None and sliding_window < self.num_columns else None
        if window not in self.masks:
            prompts = [piece.prefix_length for piece in self.segments]
            before_S = to_device(torch.tensor(prompts if len(set(prompts)) > 1 else prompts[:1]), device)
            query_SL1 = (before_S[:, None] + torch.arange(self.length, device=device))[:, :, None]
            key_C = torch.arange(self.num_columns, device=device)
            # padding stands behind a segment's own columns, so what is causal never sees it
            seen_SLC = key_C <= query_SL1
            if window is not None:
                seen_SLC &= key_C > query_SL1 - window
            self.masks[window] = seen_SLC[0] if seen_SLC.shape[0] == 1 else seen_SLC[:, None]
        return self.masks[window]


@dataclass(slots=True)
class SharedLayout:
    """Layout of a row without repeated prompts, in order; used in place of a `PackedLayout`."""

    common: PackedLayout
    """Every prompt, and all tokens of segments that share nothing; they begin the row."""
    responses: tuple[Piece, ...]
    """The own tokens of each segment of a group, in order, and its prompt before them."""
    blocks: list[ResponseBlock]
    scatter_R: Tensor | None
    """[R] place of each own token among the blocks' places laid end to end; None: the same order."""
    kernel: VarlenKernel | None = None
    """Takes all parts in one call where it can; None: blocks."""
    sequences: Sequences | None = None
    """What the kernel needs of the parts, built once a forward."""

    @classmethod
    def of(cls, common: PackedLayout, responses: Sequence[Piece], device: torch.device) -> SharedLayout:
        """Layout of the common tokens and of what stands behind them."""
        blocks, scatter_R = _cut_into_blocks(responses, common.num_tokens, device)
        return cls(common, tuple(responses), blocks, scatter_R)

    def attend(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, **settings: Any) -> Tensor:
        """Compute attention by the kernel where it takes the call, else by `shared_attention`."""
        if not kernel_takes(self.kernel, query_THD, value_TGD, settings):
            return shared_attention(query_THD, key_TGD, value_TGD, self, **settings)
        assert self.kernel is not None
        if self.sequences is None:
            self.sequences = Sequences.of(self.pieces(), query_THD.device)
        return varlen_attention(query_THD, key_TGD, value_TGD, self.sequences, self.kernel, **settings)

    def pieces(self) -> list[Piece]:
        """Return one piece for every prompt and for every segment's own tokens behind its prompt."""
        return [*self.common.pieces(), *self.responses]


def _num_columns(piece: Piece) -> int:
    return piece.prefix_length + piece.length


def _cut_into_blocks(
    responses: Sequence[Piece], num_common: int, device: torch.device
) -> tuple[list[ResponseBlock], Tensor | None]:
    """Blocks of similar shape, and where each own token lies among their places."""
    scatter_R = torch.empty(sum(piece.length for piece in responses), dtype=torch.int64)
    blocks: list[ResponseBlock] = []
    num_places = 0
    for members in _similar_shapes(responses, MASKED_CALLS * most_wasted_area(device)):
        start_S1 = torch.tensor([piece.start for piece in members])[:, None]
        length_S1 = torch.tensor([piece.length for piece in members])[:, None]
        before_S1 = torch.tensor([piece.prefix_start for piece in members])[:, None]
        num_before_S1 = torch.tensor([piece.prefix_length for piece in members])[:, None]
        place_L = torch.arange(int(length_S1.max()))
        inside_SL = place_L < length_S1
        own_SL = torch.where(inside_SL, start_S1 - num_common + place_L, 0).reshape(-1)
        real = inside_SL.reshape(-1)
        scatter_R[own_SL[real]] = torch.arange(num_places, num_places + len(own_SL))[real]
        num_places += len(own_SL)
        column_C = torch.arange(int((num_before_S1 + length_S1).max()))
        behind_SC = column_C - num_before_S1
        token_SC = torch.where(behind_SC < 0, before_S1 + column_C, start_S1 + behind_SC)
        token_SC = torch.where(behind_SC < length_S1, token_SC, 0)
        blocks.append(ResponseBlock(tuple(members), to_device(own_SL, device), to_device(token_SC.reshape(-1), device)))
    in_order = bool(torch.equal(scatter_R, torch.arange(num_places)))
    if in_order and len(blocks) == 1:
        blocks[0].query_SL = None  # one length and the order of the row: it can be viewed as the block
    return blocks, None if in_order else to_device(scatter_R, device)


def _similar_shapes(responses: Sequence[Piece], most_area: float) -> list[list[Piece]]:
    """Pieces grouped, longest first; padded queries and columns stay below MAX_PADDING x their tokens.

    The entries that padding adds to the score matrices of a group stay below `most_area` for each piece but its first.
    """
    groups: list[list[Piece]] = []
    columns = length = size = area = 0
    for piece in sorted(responses, key=lambda piece: (-_num_columns(piece), -piece.length, piece.start)):
        size += _num_columns(piece) + piece.length
        length = max(length, piece.length)
        area += _num_columns(piece) * piece.length
        # the first of a group has its most columns
        num_pieces = len(groups[-1]) + 1 if groups else 0
        added = num_pieces * columns * length - area
        if groups and (columns + length) * num_pieces <= MAX_PADDING * size and added <= most_area * (num_pieces - 1):
            groups[-1].append(piece)
            continue
        groups.append([piece])
        columns, length = _num_columns(piece), piece.length
        size, area = columns + length, columns * length
    return groups


@dataclass(slots=True)
class SharedPrompts:
    """A packed row without its repeated prompts."""

    layout: SharedLayout
    kept_K: Tensor
    """[K] int64: the tokens of the packed row that run."""
    place_T: Tensor
    """[T] int64: for each token of the packed row the one among the kept whose state it has."""


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int
    stop: int
    prompt_length: int
    """Tokens before the first wanted one; 0 where no token is wanted."""

    @property
    def own_length(self) -> int:
        return self.stop - self.start - self.prompt_length


def find_shared_prefixes(
    token_ids_T: Tensor,
    positions_T: Tensor,
    segment_ids_T: Tensor,
    target_mask_T: Tensor,
    device: torch.device | None = None,
) -> SharedPrompts | None:
    """Find prompts that neighbouring segments share; None where running each once would save too little.

    Args:
        token_ids_T: int64, equal where tokens and the features of images are.
        positions_T, segment_ids_T, target_mask_T: as of `PackedTokens`.
        device: of the row, where these are copies in host memory; None = theirs.
    """
    segments = _segments(segment_ids_T, target_mask_T)
    # as lists, copied to the host once: comparing tensors would wait for the device at every pair of segments
    groups = _groups(segments, token_ids_T.tolist(), positions_T.tolist())
    saved = sum((len(group) - 1) * group[0].prompt_length for group in groups)
    # below the share the separate attention of groups costs more than it saves
    if saved == 0 or saved < _LEAST_SAVING * token_ids_T.shape[0]:
        return None
    # runs of tokens as (first, length): one tensor is made of all of them, where one for each takes ten times as long
    kept: list[tuple[int, int]] = []
    places: list[tuple[int, int]] = []
    common = [_common_length(group) for group in groups]
    kept += [(group[0].start, length) for group, length in zip(groups, common, strict=True)]
    prompts = [num_before - length for num_before, length in zip(accumulate(common), common, strict=True)]
    num_kept = sum(common)
    responses: list[Piece] = []
    for group, prompt, length in zip(groups, prompts, common, strict=True):
        if len(group) == 1:
            places.append((prompt, length))
            continue
        for segment in group:
            kept.append((segment.start + length, segment.own_length))
            responses.append(Piece(num_kept, segment.own_length, prompt, length))
            places += [(prompt, length), (num_kept, segment.own_length)]
            num_kept += segment.own_length
    device = device or token_ids_T.device
    layout = SharedLayout.of(PackedLayout.from_lengths(common, device), responses, device)
    return SharedPrompts(layout, to_device(_joined_runs(kept), device), to_device(_joined_runs(places), device))


def _joined_runs(runs: Sequence[tuple[int, int]]) -> Tensor:
    """Join first, first + 1, ... first + length - 1 of each (first, length); int64."""
    first_N, length_N = torch.tensor(runs, dtype=torch.int64).unbind(1)
    ends_N = length_N.cumsum(0)
    # what is added to a place in the joined runs is the same all along a run
    added_N = first_N - (ends_N - length_N)
    return torch.arange(int(ends_N[-1])) + torch.repeat_interleave(added_N, length_N)


def _segments(segment_ids_T: Tensor, target_mask_T: Tensor) -> list[_Segment]:
    _, lengths_S = torch.unique_consecutive(segment_ids_T, return_counts=True)
    stops_S = lengths_S.cumsum(0)
    starts_S = stops_S - lengths_S
    wanted_W = target_mask_T.nonzero()[:, 0]
    # the number of all tokens stands behind the wanted ones, for segments after the last of them
    wanted_W = torch.cat([wanted_W, wanted_W.new_full((1,), segment_ids_T.shape[0])])
    first_S = wanted_W[torch.searchsorted(wanted_W, starts_S)]
    prompt_S = torch.where(first_S < stops_S, first_S - starts_S, 0)
    rows = torch.stack([starts_S, stops_S, prompt_S], 1).tolist()
    return [_Segment(*row) for row in rows]


def _groups(segments: Sequence[_Segment], token_ids: list[int], positions: list[int]) -> list[list[_Segment]]:
    """Neighbours with one prompt together, every other segment alone."""

    def same_prompt(left: _Segment, right: _Segment) -> bool:
        length = left.prompt_length
        if length != right.prompt_length or length == 0:
            return False
        # positions too: the same tokens at other positions have other states
        return all(
            values[left.start : left.start + length] == values[right.start : right.start + length]
            for values in (token_ids, positions)
        )

    groups = [[segment] for segment in segments[:1]]
    for left, right in pairwise(segments):
        if same_prompt(left, right):
            groups[-1].append(right)
        else:
            groups.append([right])
    return groups


def _common_length(group: Sequence[_Segment]) -> int:
    """Return the number of tokens that a group has once: the prompt, or all of a segment that shares nothing."""
    return group[0].prompt_length if len(group) > 1 else group[0].stop - group[0].start


def shared_attention(
    query_KHD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    layout: SharedLayout,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`packed_attention` of the row with repeated prompts, for its kept tokens; [K, H, D]."""
    settings: dict[str, Any] = {
        "scaling": scaling,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "dropout": dropout,
    }
    # one split of each: its backward joins the parts once, where slices would each fill a row of zeros
    sizes = [layout.common.num_tokens, query_KHD.shape[0] - layout.common.num_tokens]
    own_query_RHD = query_KHD.split(sizes)[1]
    common = [tensor.split(sizes)[0] for tensor in (query_KHD, key_KGD, value_KGD)]
    outputs = [packed_attention(common[0], common[1], common[2], layout.common, **settings)]
    own: list[Tensor] = []
    for block in layout.blocks:
        query_RHD = own_query_RHD if block.query_SL is None else own_query_RHD.index_select(0, block.query_SL)
        attended = attend(
            _heads_first(query_RHD, len(block.segments)),
            _heads_first(key_KGD.index_select(0, block.column_SC), len(block.segments)),
            _heads_first(value_KGD.index_select(0, block.column_SC), len(block.segments)),
            block.mask(sliding_window, query_KHD.device),
            scaling=scaling,
            softcap=softcap,
            dropout=dropout,
        )
        own.append(attended.transpose(1, 2).flatten(0, 1))
    rows = own[0] if len(own) == 1 else torch.cat(own)
    outputs.append(rows if layout.scatter_R is None else rows.index_select(0, layout.scatter_R))
    return torch.cat(outputs)


def _heads_first(rows: Tensor, num_segments: int) -> Tensor:
    """[S * L, H, D] -> [S, H, L, D]."""
    return rows.view(num_segments, -1, *rows.shape[1:]).transpose(1, 2)
