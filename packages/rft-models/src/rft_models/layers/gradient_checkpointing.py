"""Gradient checkpointing: activations that are computed again in the backward pass instead of being kept.

    full        a layer keeps its input; its forward runs a second time (Chen et al. 2016, arXiv 1604.06174)
    selective   a layer also keeps what its matrix products and its attention give, and computes the cheap rest again:
                norms, activations, rotary positions, residual sums (Korthikanti et al. 2022, arXiv 2205.05198)

`every` = N does so in every N-th layer, and the others keep everything. No choice changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rft_core.errors import OptionsError

_KEPT = (
    "aten.mm",
    "aten.addmm",
    "aten.linear",
    "aten._grouped_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._flash_attention_forward",
    "mkldnn._linear_pointwise",
    "torch_attn._varlen_attn",
    "flash_attn._flash_attn_varlen_forward",
)
"""Operators whose results selective checkpointing keeps: nearly all of a layer's arithmetic is in them."""


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Choice of what the backward pass recomputes, see the module.

    Example: `Checkpointing(selective=True, every=2)`.
    """

    selective: bool = False
    every: int = 1

    @classmethod
    def of(cls, on: bool, mode: str = "full", every: int = 1) -> Checkpointing | None:
        """Return the choice that settings describe; None where checkpointing is off."""
        return cls(mode == "selective", every) if on else None

    def __str__(self) -> str:
        kept = "norms and activations again, matrix products and attention kept" if self.selective else "all again"
        which = "every layer" if self.every == 1 else f"one layer in {self.every}"
        return f"{'selective' if self.selective else 'full'}: {which} ({kept})"


def apply(model: Any, chosen: Checkpointing) -> int:
    """Switch a transformers model over (it acts in training mode); returns the number of layers that it acts in.

    Raises:
        OptionsError: the architecture has no layers that transformers can checkpoint.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise OptionsError(
            code="models.no_checkpointing",
            what=f"{type(model).__name__} has no layers that can be recomputed in the backward pass",
            where="--gradient_checkpointing",
            why="transformers marks such layers, and this architecture has none",
            do="leave --gradient_checkpointing out",
        )
    again = _again(chosen)
    for number, layer in enumerate(layers):
        layer._gradient_checkpointing_func = again
        layer.gradient_checkpointing = number % chosen.every == 0
    return sum(layer.gradient_checkpointing for layer in layers)


def _again(chosen: Checkpointing) -> Callable[..., Any]:
    # never reentrant: that form gives a layer no gradient where its input needs none, as behind a frozen embedding
    if not chosen.selective:
        return partial(checkpoint, use_reentrant=False)
    return partial(checkpoint, use_reentrant=False, context_fn=_selective_contexts)


def _selective_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    # the list names operators, and what is called is one of their overloads
    kept = getattr(operator, "overloadpacket", None) in _kept_operators()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _kept_operators() -> frozenset[Any]:
    """Return the operators of `_KEPT` that this torch and the imported packages define."""
    operators: set[Any] = set()
    for name in _KEPT:
        space, operator = name.split(".")
        if hasattr(getattr(torch.ops, space), operator):
            operators.add(getattr(getattr(torch.ops, space), operator))
    return frozenset(operators)
