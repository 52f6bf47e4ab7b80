"""Causal attention over segments packed one after another, without padding the model.

A micro-batch of segments of 7, 3 and 12 tokens is one row of 22 tokens: every linear layer, norm
and embedding runs on 22 rows, and only the attention looks at segments. It gathers each segment
into a row of a right-padded block, runs the causal kernel on the block and puts the rows back.
Padding stands after a segment's tokens, so a causal row never sees it and the result is exact.
Segments are cut into blocks of similar length, so that a block is at most half padding over; on a CPU, where the
time of attention is its area, into blocks whose padding costs less than another call would.

A layout with a varlen kernel (`attention.kernels`) hands it all segments in one call instead. How a transformers model
comes to compute any of this is in `attention.hf_interface`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rft_core.device_copies import to_device
from rft_models.attention.varlen import Piece, Sequences, VarlenKernel, varlen_attention

MAX_PADDING = 1.5
"""Padded places of a block over its tokens; above it the segments go into separate blocks."""

CALL_AREA = 2048
"""Entries of a score matrix that take one CPU thread about as long as one more block.

Zen 5, 4 heads of 48, forward and backward: an entry takes 50 ns and a block 0.1 ms beside it. Segments of 321, 250, 180
and 150 tokens take 18.0 ms as one block and 11.4 ms as four; of 64, 60, 50 and 48 tokens 1.05 ms and 1.39 ms."""


@dataclass(slots=True)
class AttentionBlock:
    """Segments that share one padded length."""

    num_segments: int
    length: int
    gather_SL: Tensor | None
    """[S * L] token index of each place (a padded place repeats token 0); None: the tokens in order."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask_LL(self, sliding_window: int | None, device: torch.device) -> Tensor:
        """[L, L] bool: key <= query and, with a window w, key > query - w. Built once a forward."""
        if sliding_window not in self.masks:
            position = torch.arange(self.length, device=device)
            seen = position[None, :] <= position[:, None]
            if sliding_window is not None:
                seen &= position[None, :] > position[:, None] - sliding_window
            self.masks[sliding_window] = seen
        return self.masks[sliding_window]


class RowLayout(Protocol):
    """Layout of the segments of a row, which computes the attention of its tokens."""

    def attend(
        self,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Compute the attention of the row's tokens, see `packed_attention`."""
        ...


class PiecedLayout(RowLayout, Protocol):
    """Layout of a whole row that lists the keys each token attends to."""

    def pieces(self) -> list[Piece]:
        """Runs of queries in the order of the row, each with the keys that stand before its own."""
        ...


@dataclass(slots=True)
class PackedLayout:
    """Layout of the segments of a packed row; computed once per forward, used by every layer."""

    num_tokens: int
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    blocks: list[AttentionBlock]
    scatter_T: Tensor | None
    """[T] place of each token among the blocks' places laid end to end; None: the same order."""
    kernel: VarlenKernel | None = None
    """Takes all segments in one call where it can; None: blocks."""
    sequences: Sequences | None = None
    """What the kernel needs of the segments, built once a forward."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedLayout:
        """Layout of segments of these lengths (each at least 1), in order."""
        starts, total = [], 0
        for length in lengths:
            starts.append(total)
            total += length
        blocks, scatter = _cut_into_blocks(lengths, starts, total, torch.device(device))
        return cls(total, tuple(lengths), tuple(starts), blocks, scatter)

    @classmethod
    def from_segment_ids(cls, segment_ids_T: Tensor, device: torch.device | None = None) -> PackedLayout:
        """Layout of a packed row: a segment ends where the id changes; `device` of the row, None = that of the ids."""
        if segment_ids_T.numel() == 0:
            return cls(0, (), (), [], None)
        _, lengths = torch.unique_consecutive(segment_ids_T, return_counts=True)
        return cls.from_lengths(lengths.tolist(), device or segment_ids_T.device)

    def attend(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, **settings: Any) -> Tensor:
        """Compute attention by the kernel where it takes the call, else by `packed_attention`."""
        if not kernel_takes(self.kernel, query_THD, value_TGD, settings):
            return packed_attention(query_THD, key_TGD, value_TGD, self, **settings)
        assert self.kernel is not None
        if self.sequences is None:
            self.sequences = Sequences.of(self.pieces(), query_THD.device)
        return varlen_attention(query_THD, key_TGD, value_TGD, self.sequences, self.kernel, **settings)

    def pieces(self) -> list[Piece]:
        """Return one piece for every segment."""
        return [Piece(start, length) for start, length in zip(self.starts, self.lengths, strict=True)]


def kernel_takes(kernel: VarlenKernel | None, query_THD: Tensor, value_TGD: Tensor, settings: dict[str, Any]) -> bool:
    """Return true where the kernel takes a call with these tensors and settings."""
    if kernel is None or query_THD.shape[0] == 0:
        return False
    return kernel.takes(
        query_THD, value_TGD, softcap=settings.get("softcap"), dropout=float(settings.get("dropout") or 0.0)
    )


def _cut_into_blocks(
    lengths: Sequence[int], starts: Sequence[int], total: int, device: torch.device
) -> tuple[list[AttentionBlock], Tensor | None]:
    if not lengths:
        return [], None
    # segments of one length need no padding and no gather: the row can be viewed as the block
    if min(lengths) == max(lengths):
        return [AttentionBlock(len(lengths), lengths[0], None)], None
    blocks: list[AttentionBlock] = []
    scatter = torch.empty(total, dtype=torch.int64)
    num_places = 0
    for members in _similar_lengths(lengths, most_wasted_area(device)):
        longest = max(lengths[i] for i in members)
        place_L = torch.arange(longest)
        start_S1 = torch.tensor([starts[i] for i in members])[:, None]
        inside_SL = place_L < torch.tensor([lengths[i] for i in members])[:, None]
        token_SL = torch.where(inside_SL, start_S1 + place_L, 0)  # padding repeats token 0: no causal row sees it
        flat = token_SL.reshape(-1)
        real = inside_SL.reshape(-1)
        scatter[flat[real]] = torch.arange(num_places, num_places + flat.numel())[real]
        num_places += flat.numel()
        blocks.append(AttentionBlock(len(members), longest, to_device(flat, device)))
    return blocks, to_device(scatter, device)


def most_wasted_area(device: torch.device) -> float:
    """Return the entries of score matrices that padding may add for a segment, to spare it a block of its own."""
    # threads divide the entries among them, the start of a call they do not; a GPU waits for starts alone
    return CALL_AREA * torch.get_num_threads() if device.type == "cpu" else math.inf


def _similar_lengths(lengths: Sequence[int], most_area: float) -> list[list[int]]:
    """Segment numbers grouped, longest first; padded places <= MAX_PADDING x tokens, added entries <= `most_area`."""
    groups: list[list[int]] = []
    longest = tokens = 0
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens += lengths[number]
        # the first of a group is its longest, so its length is the padded length of all
        added = longest**2 - lengths[number] ** 2
        if groups and longest * (len(groups[-1]) + 1) <= MAX_PADDING * tokens and added <= most_area:
            groups[-1].append(number)
            continue
        groups.append([number])
        longest = tokens = lengths[number]
    return groups


def packed_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    layout: PackedLayout,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scaling q k^T) v inside each segment, causal; [T, H, D].

    H query heads share G key heads (G divides H). With a `sliding_window` w a token sees itself
    and the w - 1 before it. With a `softcap` c the scores are c tanh(scores / c) (Gemma 2,
    arXiv 2408.00118, section 2).
    """
    outputs = []
    for block in layout.blocks:
        query, key, value = (to_block(tensor, block) for tensor in (query_THD, key_TGD, value_TGD))
        # a window that spans the block hides nothing, and plain causal attention needs no [L, L] mask
        windowed = sliding_window is not None and block.length > sliding_window
        window = sliding_window if windowed else None
        mask = block.mask_LL(window, query.device) if windowed or softcap is not None else None
        attended = attend(query, key, value, mask, scaling=scaling, softcap=softcap, dropout=dropout)
        outputs.append(attended.transpose(1, 2).reshape(-1, *query_THD.shape[1:-1], value_TGD.shape[-1]))
    rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return rows if layout.scatter_T is None else rows.index_select(0, layout.scatter_T)


def to_block(tensor_THD: Tensor, block: AttentionBlock) -> Tensor:
    """Gather the segments of a block, padded: [T, H, D] -> [S, H, L, D]."""
    rows = tensor_THD if block.gather_SL is None else tensor_THD.index_select(0, block.gather_SL)
    return rows.view(block.num_segments, block.length, *tensor_THD.shape[1:]).transpose(1, 2)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Attention of a block, [S, H, Lq, D]; `mask` [Lq, Lk] bool, or None for plain causal (softcapping needs one)."""
    if softcap is not None:
        return softcapped_attention(query, key, value, mask, scaling=scaling, softcap=softcap, dropout=dropout)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def softcapped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention written out, [B, H, Lq, D], for scores that no fused kernel takes; softmax in float32."""
    num_groups = query.shape[1] // key.shape[1]
    if num_groups > 1:
        key, value = key.repeat_interleave(num_groups, 1), value.repeat_interleave(num_groups, 1)
    scores = (query @ key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        # The lowest finite value, not -inf: a padded query sees nothing, and its row must stay finite.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=_softmax_dtype(query)).to(query.dtype)
    return F.dropout(weights, dropout) @ value if dropout else weights @ value


def _softmax_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32
