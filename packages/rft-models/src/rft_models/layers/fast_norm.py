"""RMS norms of a decoder with a gradient of seven operations, where autograd's takes nearly twice as many.

    n = x / sqrt(mean(x^2) + eps),  y = w n
    dw = sum over rows of g n,  dx = (g w - n mean(g w n)) / sqrt(mean(x^2) + eps)

(Zhang and Sennrich 2019, "Root mean square layer normalization", arXiv 1910.07467.) A decoder has four norms a layer
where queries and keys have their own, and at small widths the time of a norm on a CPU is that of starting its
operations. The values are those of the modules that are replaced, to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_REPLACED = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
"""Classes of transformers that compute w n with n in float32; Gemma's, say, multiply by 1 + w."""


def use_fast_norms(model: nn.Module) -> int:
    """Let the RMS norms of `model` have the gradient from here; return how many there are.

    As with `use_fast_linears`, parameters, names and the saved file stay as they are, and modules whose computation
    is not known are left alone.
    """
    num_changed = 0
    for module in model.modules():
        if type(module).__name__ in _REPLACED and type(module).__module__.startswith("transformers."):
            module.__class__ = FastRmsNorm  # in place: parameters, names and hooks stay
            num_changed += 1
    return num_changed


class FastRmsNorm(nn.Module):
    """y = w x / sqrt(mean(x^2) + eps) over the last dimension; made from a module of transformers alone."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        if not _has_own_gradient(hidden_states, self.weight):
            normed, _ = _normed(hidden_states.to(torch.float32), self.variance_epsilon)
            return self.weight * normed.to(hidden_states.dtype)
        result = _RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)
        assert isinstance(result, Tensor)
        return result

    def extra_repr(self) -> str:
        """Describe the module as the replaced ones do."""
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class _RmsNorm(torch.autograd.Function):
    """The equations of the module's head, in float32 on a CPU."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        normed, inverse = _normed(hidden, epsilon)
        ctx.save_for_backward(normed, inverse, weight_D)
        return weight_D * normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        normed, inverse, weight_D = ctx.saved_tensors
        width = weight_D.shape[0]
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            weighted = grads[0] * weight_D
            # no product of a matrix with a vector: the bits of MKL's depend on where in memory the operands begin
            along = (weighted * normed).sum(-1, keepdim=True)
            grad_hidden = weighted.addcmul_(normed, along, value=-1 / width).mul_(inverse)
        if ctx.needs_input_grad[1]:
            grad_weight = (grads[0] * normed).reshape(-1, width).sum(0)
        return grad_hidden, grad_weight, None


def _normed(hidden: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(n, 1 / sqrt(mean(x^2) + eps) [..., 1])."""
    inverse = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)
    return hidden * inverse, inverse


def _has_own_gradient(hidden: Tensor, weight: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and (hidden.requires_grad or weight.requires_grad)
        and hidden.device.type == "cpu"
        and hidden.dtype is torch.float32
        and weight.dtype is torch.float32
        and not hasattr(weight, "placements")  # sharded over ranks (DTensor)
        and not hasattr(hidden, "placements")
        # the compiler makes one kernel of the operations
        and not torch.compiler.is_compiling()
    )
