"""Causal attention over segments packed one after another, without padding the model.

A micro-batch of segments of 7, 3 and 12 tokens is one row of 22 tokens: every linear layer, norm
and embedding runs on 22 rows, and only the attention looks at segments. It gathers each segment
into a row of a right-padded block, runs the causal kernel on the block and puts the rows back.
Padding stands after a segment's tokens, so a causal row never sees it and the result is exact.
Segments are cut into blocks of similar length, so that a block is at most half padding over.

The functions are registered with transformers under `rft_packed`: a model that was switched to
that implementation takes `packed_layout=` as a forward argument, and without one computes the
usual masked attention (softcapping included).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rft_algos.errors import OptionsError

IMPLEMENTATION = "rft_packed"
_MAX_PADDING = 1.5
"""Padded area of a block over its tokens; above it the segments go into separate blocks."""

_UNKNOWN_MEANING = ("s_aux", "position_bias", "sinks")
"""Arguments some architectures pass that change the scores; ignoring them would be wrong silently."""


@dataclass(slots=True)
class Block:
    """Segments that share one padded length."""

    num_segments: int
    length: int
    gather_SL: Tensor | None
    """[S * L] token index of each place (a padded place repeats token 0); None: the tokens in order."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask_LL(self, sliding_window: int | None, device: torch.device) -> Tensor:
        """[L, L] bool: key <= query and, with a window w, key > query - w. Built once a forward."""
        if sliding_window not in self.masks:
            place = torch.arange(self.length, device=device)
            seen = place[None, :] <= place[:, None]
            if sliding_window is not None:
                seen &= place[None, :] > place[:, None] - sliding_window
            self.masks[sliding_window] = seen
        return self.masks[sliding_window]


class RowLayout(Protocol):
    """Where the segments of a row lie, and how its tokens attend."""

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
        """See `packed_attention`."""
        ...


@dataclass(slots=True)
class PackedLayout:
    """Where the segments of a packed row lie; computed once per forward, used by every layer."""

    num_tokens: int
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    blocks: list[Block]
    scatter_T: Tensor | None
    """[T] place of each token among the blocks' places laid end to end; None: the same order."""

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
    def from_segment_ids(cls, segment_ids_T: Tensor) -> PackedLayout:
        """Layout of a packed row: a segment ends where the id changes."""
        if segment_ids_T.numel() == 0:
            return cls(0, (), (), [], None)
        _, lengths = torch.unique_consecutive(segment_ids_T, return_counts=True)
        return cls.from_lengths(lengths.tolist(), segment_ids_T.device)

    def attend(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, **settings: Any) -> Tensor:
        """See `packed_attention`."""
        return packed_attention(query_THD, key_TGD, value_TGD, self, **settings)


def _cut_into_blocks(
    lengths: Sequence[int], starts: Sequence[int], total: int, device: torch.device
) -> tuple[list[Block], Tensor | None]:
    if not lengths:
        return [], None
    if min(lengths) == max(lengths):
        return [Block(len(lengths), lengths[0], None)], None
    blocks: list[Block] = []
    scatter = torch.empty(total, dtype=torch.int64)
    num_places = 0
    for members in _similar_lengths(lengths):
        longest = max(lengths[i] for i in members)
        place_L = torch.arange(longest)
        start_S1 = torch.tensor([starts[i] for i in members])[:, None]
        inside_SL = place_L < torch.tensor([lengths[i] for i in members])[:, None]
        token_SL = torch.where(inside_SL, start_S1 + place_L, 0)
        flat = token_SL.reshape(-1)
        real = inside_SL.reshape(-1)
        scatter[flat[real]] = torch.arange(num_places, num_places + flat.numel())[real]
        num_places += flat.numel()
        blocks.append(Block(len(members), longest, flat.to(device)))
    return blocks, scatter.to(device)


def _similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Segment numbers grouped, longest first, so that padded places <= _MAX_PADDING x tokens in a group."""
    groups: list[list[int]] = []
    longest = tokens = 0
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens += lengths[number]
        if groups and longest * (len(groups[-1]) + 1) <= _MAX_PADDING * tokens:
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
        windowed = sliding_window is not None and block.length > sliding_window
        window = sliding_window if windowed else None
        mask = block.mask_LL(window, query.device) if windowed or softcap is not None else None
        attended = attend(query, key, value, mask, scaling=scaling, softcap=softcap, dropout=dropout)
        outputs.append(attended.transpose(1, 2).reshape(-1, *query_THD.shape[1:-1], value_TGD.shape[-1]))
    places = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return places if layout.scatter_T is None else places.index_select(0, layout.scatter_T)


def to_block(tensor_THD: Tensor, block: Block) -> Tensor:
    """[T, H, D] -> [S, H, L, D]."""
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


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_layout: RowLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers: query [B, H, T, D], key and value [B, G, T, D] -> [B, T, H, D].

    Raises `OptionsError` where the architecture passes an argument that changes the scores and
    that is not computed here.
    """
    unknown = [name for name in _UNKNOWN_MEANING if kwargs.get(name) is not None]
    if unknown:
        raise OptionsError(
            code="models.attention_argument",
            what=f"{type(module).__name__} passes {unknown} to its attention",
            where=f"attention implementation {IMPLEMENTATION}",
            why=f"the packed attention computes scaling, sliding windows and softcapping, not {unknown}",
            do='load the model with attention="native"',
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if packed_layout is not None:
        packed = packed_layout.attend(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            scaling=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            dropout=dropout,
        )
        return packed[None], None
    return _dense(query, key, value, attention_mask, scale, softcap, dropout), None


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """[B, T, H, D]. `mask` [B, 1, Lq, Lk] bool, or None for plain causal (windows are in the mask)."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    causal = mask is None and num_queries > 1
    if causal and (softcap is not None or num_queries != num_keys):
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
        causal = False
    if softcap is not None:
        attended = softcapped_attention(query, key, value, mask, scaling=scaling, softcap=softcap, dropout=dropout)
    else:
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return attended.transpose(1, 2).contiguous()


def register() -> None:
    """Make `rft_packed` known to transformers. Safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, attention_function)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def no_mask(device: torch.device | str) -> Tensor:
    """What stands for the attention mask in a packed forward.

    transformers takes a mask of four dimensions as finished and hands it through, so no [T, T]
    mask is built; the attention function ignores it because it has the layout.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
