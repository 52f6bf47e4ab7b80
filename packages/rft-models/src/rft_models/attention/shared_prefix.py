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
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rft_models.attention.packed import AttentionBlock, PackedLayout, attend, kernel_takes, packed_attention, to_block
from rft_models.attention.varlen import Piece, Sequences, VarlenKernel, varlen_attention

_LEAST_SAVING = 0.125
"""Share of the tokens that must be repetition: below it the groups' separate attention costs more than it saves."""


@dataclass(slots=True)
class PrefixGroup:
    """The prompt's tokens, then the own tokens of each of its segments.

    Several groups of one shape (prompt length, number of segments, one length of all their own tokens)
    are one: all their prompts, then all their own tokens, so that a layer attends to them in one call.
    """

    prompt: PackedLayout
    own: PackedLayout
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def mask_LC(self, length: int, sliding_window: int | None, device: torch.device) -> Tensor:
        """[L, P + L] bool: what the L own tokens of a segment see of the prompt and of one another."""
        prompt_length = self.prompt.lengths[0]
        columns = prompt_length + length
        # a window that spans all columns hides nothing and shares the mask without a window
        window = sliding_window if sliding_window is not None and sliding_window < columns else None
        if (length, window) not in self.masks:
            key_1C = torch.arange(columns, device=device)[None, :]
            query_L1 = torch.arange(prompt_length, columns, device=device)[:, None]
            seen_LC = key_1C <= query_L1
            if window is not None:
                seen_LC &= key_1C > query_L1 - window
            self.masks[length, window] = seen_LC
        return self.masks[length, window]


@dataclass(slots=True)
class SharedLayout:
    """Layout of a row without repeated prompts, in order; used in place of a `PackedLayout`."""

    runs: list[PrefixGroup | PackedLayout]
    kernel: VarlenKernel | None = None
    """Takes all parts in one call where it can; None: blocks."""
    sequences: Sequences | None = None
    """What the kernel needs of the parts, built once a forward."""

    @property
    def sizes(self) -> list[int]:
        """Tokens of each part: prompt and own tokens of a group, all tokens of segments that share nothing."""
        sizes: list[int] = []
        for run in self.runs:
            sizes += [run.num_tokens] if isinstance(run, PackedLayout) else [run.prompt.num_tokens, run.own.num_tokens]
        return sizes

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
        return _pieces(self.runs)


def _pieces(runs: Sequence[PrefixGroup | PackedLayout]) -> list[Piece]:
    """Return a piece for every prompt and every segment's own tokens behind its prompt, in the order of the row."""
    pieces: list[Piece] = []
    begin = 0
    for run in runs:
        plain = run if isinstance(run, PackedLayout) else run.prompt
        prompts = [Piece(begin + start, length) for start, length in zip(plain.starts, plain.lengths, strict=True)]
        pieces += prompts
        begin += plain.num_tokens
        if isinstance(run, PackedLayout):
            continue
        # groups of one run have one shape, so every prompt has as many segments
        copies = len(run.own.lengths) // len(prompts)
        for number, (start, length) in enumerate(zip(run.own.starts, run.own.lengths, strict=True)):
            prompt = prompts[number // copies]
            pieces.append(Piece(begin + start, length, prompt.start, prompt.length))
        begin += run.own.num_tokens
    return pieces


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
    token_ids_T: Tensor, positions_T: Tensor, segment_ids_T: Tensor, target_mask_T: Tensor
) -> SharedPrompts | None:
    """Find prompts that neighbouring segments share; None where running each once would save too little.

    Args:
        token_ids_T: int64, equal where tokens and the features of images are.
        positions_T, segment_ids_T, target_mask_T: as of `PackedTokens`.
    """
    segments = _segments(segment_ids_T, target_mask_T)
    # as lists, copied to the host once: comparing tensors would wait for the device at every pair of segments
    groups = _groups(segments, token_ids_T.tolist(), positions_T.tolist())
    saved = sum((len(group) - 1) * group[0].prompt_length for group in groups)
    # below the share the separate attention of groups costs more than it saves
    if saved == 0 or saved < _LEAST_SAVING * token_ids_T.shape[0]:
        return None
    device = token_ids_T.device
    kept: list[Tensor] = []
    place_T = torch.empty(token_ids_T.shape[0], dtype=torch.int64)
    num_kept = 0
    # in the order of the runs below: the kept tokens of a batch are neighbours, prompts before own tokens
    for batch in _batches(groups):
        for group in batch:  # the prompts (of a segment that shares nothing: all of it), then what follows them
            first, length = group[0].start, _common_length(group)
            kept.append(torch.arange(first, first + length))
            for segment in group:
                place_T[segment.start : segment.start + length] = torch.arange(num_kept, num_kept + length)
            num_kept += length
        for segment in (segment for group in batch if len(group) > 1 for segment in group):
            first, length = segment.start + segment.prompt_length, segment.own_length
            kept.append(torch.arange(first, segment.stop))
            place_T[first : segment.stop] = torch.arange(num_kept, num_kept + length)
            num_kept += length
    runs = [_run(batch, device) for batch in _batches(groups)]
    return SharedPrompts(SharedLayout(runs), torch.cat(kept).to(device), place_T.to(device))


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


def _batches(groups: Sequence[list[_Segment]]) -> list[list[list[_Segment]]]:
    """Groups of one shape together, groups with own tokens of several lengths each alone, the rest as one."""
    batches: dict[tuple[int, ...], list[list[_Segment]]] = {}
    for number, group in enumerate(groups):
        own = {segment.own_length for segment in group}
        shape = (group[0].prompt_length, len(group), *own)
        key = (0,) if len(group) == 1 else shape if len(own) == 1 else (-1, number)
        batches.setdefault(key, []).append(group)
    return list(batches.values())


def _run(batch: Sequence[Sequence[_Segment]], device: torch.device) -> PrefixGroup | PackedLayout:
    prompts = PackedLayout.from_lengths([_common_length(group) for group in batch], device)
    if len(batch[0]) == 1:
        return prompts
    own = [segment.own_length for group in batch for segment in group]
    return PrefixGroup(prompts, PackedLayout.from_lengths(own, device))


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
    parts = iter(zip(*(tensor.split(layout.sizes) for tensor in (query_KHD, key_KGD, value_KGD)), strict=True))
    outputs: list[Tensor] = []
    for run in layout.runs:
        query, key, value = next(parts)
        plain = run if isinstance(run, PackedLayout) else run.prompt
        outputs.append(packed_attention(query, key, value, plain, **settings))
        if isinstance(run, PrefixGroup):
            outputs.append(_own_attention(next(parts), key, value, run, **settings))
    return torch.cat(outputs)


def _own_attention(
    own: tuple[Tensor, ...],
    prompt_key_PGD: Tensor,
    prompt_value_PGD: Tensor,
    group: PrefixGroup,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Compute attention of a group's own tokens over the prompt's columns and their own; [tokens, H, D].

    `own` are their queries, keys and values.
    """
    outputs = []
    for block in group.own.blocks:
        query = to_block(own[0], block)
        attended = attend(
            query,
            _behind_prompt(prompt_key_PGD, own[1], group, block),
            _behind_prompt(prompt_value_PGD, own[2], group, block),
            group.mask_LC(block.length, sliding_window, query.device),
            scaling=scaling,
            softcap=softcap,
            dropout=dropout,
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return rows if group.own.scatter_T is None else rows.index_select(0, group.own.scatter_T)


def _behind_prompt(prompt_PGD: Tensor, own_TGD: Tensor, group: PrefixGroup, block: AttentionBlock) -> Tensor:
    """[S, G, P + L, D]: the columns of its prompt before those of each of the block's segments."""
    num_prompts = len(group.prompt.lengths)
    heads, width = prompt_PGD.shape[1:]
    prompts = prompt_PGD.view(num_prompts, 1, -1, heads, width)
    columns = prompts.expand(-1, block.num_segments // num_prompts, -1, -1, -1).flatten(0, 1)
    return torch.cat([columns, to_block(own_TGD, block).transpose(1, 2)], 1).transpose(1, 2)
