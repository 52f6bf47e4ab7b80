"""A slab of the vocabulary by the definitions, in float64: its sums, and the gradient of its products by autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rft_models.logprobs.epilogue import RowTerms, Shape
from rft_models.logprobs.row_statistics import SlabSums

START, STOP = 4, 8
"""The slab; the targets of the rows stand at its first and last entry, beside both, and far from it."""
TARGETS = torch.tensor([4, 7, 8, 3, 0, 10])
ROWS, VOCAB = 6, 11


def products() -> Tensor:
    """[R, V] of h W^T, spread over several softcaps."""
    return 2 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


@dataclass(frozen=True)
class Reference:
    """Rows over the whole vocabulary, and what a slab of them must give."""

    products_RV: Tensor
    shape: Shape

    def logits(self, products_RV: Tensor | None = None) -> Tensor:
        """[R, V]."""
        found = self.products_RV if products_RV is None else products_RV
        cap = self.shape.softcap
        return (found if cap is None else cap * torch.tanh(found / cap)) / self.shape.temperature

    def sums(self, start: int = START, stop: int = STOP) -> SlabSums:
        """Of entries start .. stop - 1."""
        part = self.logits()[:, start:stop]
        highest = part.max(1).values
        below = part - highest[:, None]
        held = [
            self.logits()[row, y] if start <= y < stop else part.new_tensor(-torch.inf) for row, y in enumerate(TARGETS)
        ]
        total, moment = below.exp().sum(1), (below * below.exp()).sum(1)
        return SlabSums(highest, total, moment, torch.stack(held), part.max(1).indices + start)

    def log_share(self, start: int = START, stop: int = STOP) -> Tensor:
        """[R] log of the probability of entries start .. stop - 1."""
        return self.logits()[:, start:stop].logsumexp(1) - self.logits().logsumexp(1)

    def terms(self, grad_R: Tensor, entropy_grad_R: Tensor | None, dtype: torch.dtype = torch.float64) -> RowTerms:
        """What the gradients of a slab need to know of the rows."""
        table = torch.log_softmax(self.logits(), 1)
        highest = self.logits().max(1).values
        log_total = self.logits().logsumexp(1) - highest
        logprobs, entropy = table.gather(1, TARGETS[:, None])[:, 0], -(table.exp() * table).sum(1)
        numbers = (logprobs, highest, log_total, entropy, grad_R, entropy_grad_R)
        return RowTerms(TARGETS, *(None if x is None else x.to(dtype) for x in numbers))  # type: ignore[arg-type]

    def slopes(self, grad_R: Tensor, entropy_grad_R: Tensor | None) -> Tensor:
        """[R, V] gradient of the products of sum(g log p(y)) + sum(g_H H)."""
        leaf = self.products_RV.detach().clone().requires_grad_()
        table = torch.log_softmax(self.logits(leaf), 1)
        total = (grad_R * table.gather(1, TARGETS[:, None])[:, 0]).sum()
        if entropy_grad_R is not None:
            total = total - (entropy_grad_R * (table.exp() * table).sum(1)).sum()
        return torch.autograd.grad(total, leaf)[0]


GRAD = torch.linspace(-1.5, 2, ROWS, dtype=torch.float64)
ENTROPY_GRAD = torch.linspace(0.7, -0.4, ROWS, dtype=torch.float64)
SHAPES = [Shape(1.0, None), Shape(0.7, None), Shape(1.1, None), Shape(1.0, 3.0), Shape(0.7, 1.5)]
