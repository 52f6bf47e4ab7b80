"""The network of SASRec: causal self-attention over items, the next one by a soft-max over the whole catalogue."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rft_core.keyed_random import derive_key, keyed_normal


@dataclass(frozen=True, slots=True, kw_only=True)
class SasRecSizes:
    """Sizes of the network.

    Example: `SasRecSizes(num_items=3686)` has about 0.34 M parameters.
    """

    num_items: int
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    max_history: int = 20
    """Newest items of a history that it reads."""
    dropout: float = 0.3


class KeyedDropout:
    """Dropout whose masks are drawn by a generator of its own; off without one."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.generator: torch.Generator | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return the values with a share of them zero and the others scaled up."""
        if self.generator is None or not self.share:
            return values
        kept = torch.rand(values.shape, generator=self.generator) >= self.share
        return values * kept / (1 - self.share)


class _Block(nn.Module):
    def __init__(self, sizes: SasRecSizes, dropout: KeyedDropout) -> None:
        super().__init__()
        width = sizes.hidden
        self.heads, self.dropout = sizes.heads, dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        rows, length, width = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.dropout(self.out(seen.transpose(1, 2).reshape(rows, length, width)))
        return x_BTD + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x_BTD)))))


class SasRecNetwork(nn.Module):
    """Items to the log-probabilities of the next item; its weights are a function of the seed.

    Sources: Kang and McAuley 2018 (arXiv 1808.09781) for the network; Klenitskiy and Vasilev 2023 (arXiv 2309.07602)
    for the full soft-max with cross-entropy in place of one negative item.
    """

    def __init__(self, sizes: SasRecSizes, seed: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.dropout = KeyedDropout(sizes.dropout)
        self.start = nn.Parameter(torch.empty(sizes.hidden))
        self.items = nn.Parameter(torch.empty(sizes.num_items, sizes.hidden))
        self.positions = nn.Parameter(torch.empty(sizes.max_history + 1, sizes.hidden))
        self.item_bias = nn.Parameter(torch.empty(sizes.num_items))
        self.blocks = nn.ModuleList([_Block(sizes, self.dropout) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(sizes.hidden)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                elif "norm" in name:
                    parameter.fill_(1.0)
                else:
                    parameter.copy_(0.05 * keyed_normal(parameter.shape, derive_key(seed, f"sasrec:{name}")))

    def states(self, items_BT: Tensor) -> Tensor:
        """[B, T + 1, D] states: place 0 before any item, place t behind t items; of -1 and behind it none is meant."""
        rows = items_BT.shape[0]
        start = self.start.expand(rows, 1, -1)
        x = torch.cat([start, functional.embedding(items_BT.clamp(min=0), self.items)], 1)
        x = self.dropout(x + self.positions[: x.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        """[..., N] logits of the next item."""
        return states @ self.items.T + self.item_bias
