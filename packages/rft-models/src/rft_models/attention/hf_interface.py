"""The packed attention as an attention implementation of transformers, under the name `rft_packed`.

A model that was switched to it takes `packed_layout=` as a forward argument, and without one computes the usual
masked attention (softcapping included).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rft_core.errors import OptionsError
from rft_models.attention.packed import RowLayout, softcapped_attention
from rft_models.families.vision import is_vision

IMPLEMENTATION = "rft_packed"

_UNKNOWN_MEANING = ("s_aux", "position_bias", "sinks")
"""Arguments some architectures pass that change the scores; ignoring them would be wrong silently."""


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    packed_layout: RowLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: query [B, H, T, D], key and value [B, G, T, D] -> [B, T, H, D].

    The sliding window is the argument `sliding_window`, or that of the module where the architecture leaves the
    argument out (Qwen2-MoE, whose masks hold it).

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
        # a packed forward has one row; its segments are known to the layout alone
        packed = packed_layout.attend(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            scaling=scale,
            sliding_window=kwargs.get("sliding_window", getattr(module, "sliding_window", None)),
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
    # torch's own causal mask aligns the first query with the first key; behind a cache the last ones belong together
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


def keep_out_of_graphs() -> None:
    """Leave the packed attention out of compiled layers: its layout is another one in each micro-batch."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attention_function))  # pyright: ignore


def no_mask(device: torch.device | str) -> Tensor:
    """Return the placeholder of the attention mask in a packed forward.

    transformers takes a mask of four dimensions as finished and hands it through, so no [T, T]
    mask is built; the attention function ignores it because it has the layout.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


@contextmanager
def native_attention_mode(model: Any, *, packed: bool) -> Iterator[None]:
    """Let a model that was switched to the packed attention compute its own for a while."""
    if packed:
        # not sdpa, which leaves softcapping out
        switched(model).set_attn_implementation("eager")
    try:
        yield
    finally:
        if packed:
            switched(model).set_attn_implementation(IMPLEMENTATION)


def switched(model: Any) -> Any:
    """Return the module that the packed attention is set on: of a vision-language model only the decoder."""
    return model.get_decoder() if is_vision(model.config.model_type) else model
