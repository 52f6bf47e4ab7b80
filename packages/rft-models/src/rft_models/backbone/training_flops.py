"""Floating-point operations of training a decoder on a sequence, by formula.

    F(n) = (6 P + 4 P') n + 6 L q n^2

for n tokens: P are the entries of matrices that a token is multiplied with and that are trained (forward 2, backward
4), P' of those that are frozen (4: no gradient of their own), of L layers and the output matrix; of E experts those
that one token goes through. q = heads x head size; the last term is attention under a causal mask, 12 L q n (n / 2)
(Chowdhery et al. 2022, "PaLM", appendix B, with the half that the mask leaves). The lookup in the embedding is no
product. Recomputation is not counted: these are operations of the model, not of the machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ACTIVE = ("num_experts_per_tok", "top_k", "moe_top_k")


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """Operations of forward and backward.

    Example::

        TrainingFlops(per_token=6 * 124_000_000, per_pair=6 * 12 * 768).of(1024)
    """

    per_token: float
    """6 P + 4 P'."""
    per_pair: float
    """6 L q, of each pair of a token and one before it, twice."""

    def of(self, num_tokens: int) -> float:
        """Operations of one sequence of so many tokens."""
        return self.per_token * num_tokens + self.per_pair * num_tokens**2


def training_flops(blocks: Iterable[nn.Module], head_weight: Tensor | None, config: Any) -> TrainingFlops:
    """Count the operations of a decoder.

    Args:
        blocks: its layers.
        head_weight: [V, D], the output matrix; None = there is none, or one that is next to nothing.
        config: of transformers, of the text decoder.
    """
    layers = list(blocks)
    share = _active_share(config)
    per_token = 0.0
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if parameter.ndim in (2, 3) and not name.endswith("bias"):
                per_token += _of_product(parameter) * (share if "experts" in name.split(".") else 1.0)
    if head_weight is not None:
        per_token += _of_product(head_weight)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return TrainingFlops(per_token, 6.0 * len(layers) * width)


def _of_product(weight: Tensor) -> float:
    return (6.0 if weight.requires_grad else 4.0) * weight.numel()


def _active_share(config: Any) -> float:
    """Return the share of the routed experts that a token goes through; 1 without experts."""
    count, active = (
        next((getattr(config, name) for name in names if getattr(config, name, None)), 0)
        for names in (_EXPERTS, _ACTIVE)
    )
    return active / count if count and active else 1.0
