"""Matrix products of linear layers, through oneDNN where that is the faster float32 path on a CPU.

torch sends float32 products on a CPU to MKL, which on AMD processors leaves half of the vector
width unused: the same product through oneDNN takes 0.45 to 0.5 of the time (2048 x 256 x 1024,
one thread, Zen 5: 9.6 ms against 4.3 ms) with the same float32 arithmetic. The operator that
reaches oneDNN has no autograd, so `_Linear` supplies the two gradients. Everything else (other
dtypes, other devices, small products, autocast) goes through `torch.nn.functional.linear`.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_CACHED_SHAPES = 32
"""Shapes of products that oneDNN, and torch's layer above it, keep prepared; 1,024 in both unless this is said.

Each holds memory of the size of its inputs, and micro-batches without padding have another number of tokens nearly
every time: over 64 to 3,063 rows times a matrix of 512 x 256 a process grew by 4.7 GB with 1,024 and by 0.2 GB with 32,
in the same time. A layer needs about a dozen, and the layers of a model share them.
"""
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    # both are read at the first product
    os.environ.setdefault(_name, str(_CACHED_SHAPES))

_FEW_PRODUCTS = 2**20
"""Below this many multiply-adds the fixed cost of the operator (about 12 microseconds) eats the gain.

One thread, Zen 5: 4 rows of 512 x 512 take 41 microseconds either way, 8 rows 49 against 62. Two threads: a row of
768 x 4096 takes 0.21 ms against 0.73, 8 rows 0.53 against 1.16; the last samples of a rollout are such products.
"""

_ROWS_OF_LAYOUT = 64

_SMALL_WEIGHT = 2**17
_FEW_PRODUCTS_OF_SMALL = 2**23
"""The bound for a weight of at most so many entries, which stays in a core's cache: only arithmetic is left to gain.

One thread, a busy machine, 64 rows of a 2-layer model of width 64: a decode step takes 0.93 of the time, the forward
and backward passes of 8 sequences each 0.9. On a weight of 256 x 512 both operators take 0.22 ms for 64 rows.
"""


def linear(inputs: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """y = x W^T + b. `inputs` [..., K], `weight_NK` [N, K], result [..., N]; differentiable.

    Equal to `torch.nn.functional.linear` up to the order of the float32 sums.
    """
    if not _suits_onednn(inputs, weight_NK, bias_N):
        return F.linear(inputs, weight_NK, bias_N)
    if torch.is_grad_enabled() and (inputs.requires_grad or weight_NK.requires_grad or _needs_grad(bias_N)):
        return _apply(inputs, weight_NK, bias_N)
    return _onednn(inputs, weight_NK, bias_N)


class PackedMatrix:
    """W of y = x W^T + b for many products with the same values: laid out once as oneDNN reads it.

    Given a plain matrix the operator lays it out anew at every call, which is half of the time of a product of a few
    rows (8 rows of 768 x 3072, one thread, Zen 4: 1.07 ms against 0.50) and a tenth of one of 128. The layout is made
    at the first product that goes there. Results are those of `linear` to the last bit.
    """

    def __init__(self, weight_NK: Tensor) -> None:
        """Take a matrix [N, K] whose values stay as they are for the lifetime of this object."""
        self.weight = weight_NK
        self._packed: Tensor | None = None

    @property
    def packed_bytes(self) -> int:
        """Memory of oneDNN's layout, without its padding; 0 where there is none."""
        return 0 if self._packed is None else self._packed.numel() * self._packed.element_size()

    def linear(self, inputs: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """y = x W^T + b as `linear` computes it."""
        # a single row is a product with a vector, which gains nothing and whose sums have another order
        suits = inputs.numel() > inputs.shape[-1] and _suits_onednn(inputs, self.weight, bias_N)
        if not suits or torch.is_grad_enabled() or not _onednn_packs():
            return linear(inputs, self.weight, bias_N)
        if self._packed is None:
            self._packed = _packed(self.weight.detach())
        return _onednn(inputs, self._packed, bias_N)


def product_nt(left_RK: Tensor, right_NK: Tensor) -> Tensor:
    """left right^T, [R, N], for code that writes its own gradients. Not differentiable."""
    if _suits_onednn(left_RK, right_NK, None):
        return _onednn(left_RK, right_NK, None)
    return left_RK @ right_NK.t()


def use_fast_linears(model: nn.Module) -> int:
    """Let every plain `nn.Linear` of `model` compute through `linear`; returns how many there are.

    Only the method that computes changes: parameters, names and the saved file stay as they are,
    and a layer that is not exactly `nn.Linear` (quantized, wrapped) is left alone.
    """
    num_changed = 0
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear  # in place: parameters, names and hooks stay
            num_changed += 1
    return num_changed


class FastLinear(nn.Linear):
    """`nn.Linear` whose product goes through `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """y = x W^T + b."""
        return linear(input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    """y = x W^T + b with dx = g W, dW = g^T x, db = sum of g over rows."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight_NK)
        ctx.has_bias = bias_N is not None
        return _onednn(inputs, weight_NK, bias_N)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight_NK = ctx.saved_tensors
        grad_RN = grads[0].reshape(-1, weight_NK.shape[0])
        grad_inputs = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_inputs = product_nt(grad_RN, weight_NK.t()).view(inputs.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = product_tn(grad_RN, inputs.reshape(-1, weight_NK.shape[1]))
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad_RN.sum(0)
        return grad_inputs, grad_weight, grad_bias


def product_tn(left_RN: Tensor, right_RK: Tensor, out_NK: Tensor | None = None) -> Tensor:
    """left^T right, [N, K] and contiguous (or into `out_NK`): the weight gradient. Not differentiable."""
    if not _suits_onednn(right_RK.t(), left_RN.t(), None):
        return torch.mm(left_RN.t(), right_RK, out=out_NK)
    if out_NK is None and left_RN.shape[1] <= right_RK.shape[1]:
        return _onednn(left_RN.t(), right_RK.t(), None)
    # Written as (x^T g)^T: with the wide side as the output columns oneDNN is faster by more than the
    # copy takes. Without the copy, gradients of two micro-batches would be added across layouts, which
    # takes 20 times as long (1024 x 256: 0.46 ms against 0.02 ms, and 0.1 ms for the copy).
    product_NK = _onednn(right_RK.t(), left_RN.t(), None).t()
    return product_NK.contiguous() if out_NK is None else out_NK.copy_(product_NK)


def _apply(inputs: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    result = _Linear.apply(inputs, weight_NK, bias_N)
    assert isinstance(result, Tensor)
    return result


def _onednn(inputs: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight_NK, bias_N, "none", [], "")


def _packed(weight_NK: Tensor) -> Tensor:
    # the layout is chosen for this number of rows and is as fast for 8 and for 512
    return torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _ROWS_OF_LAYOUT)


def _needs_grad(bias_N: Tensor | None) -> bool:
    return bias_N is not None and bias_N.requires_grad


def _suits_onednn(inputs: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> bool:
    few = _FEW_PRODUCTS if weight_NK.numel() > _SMALL_WEIGHT else _FEW_PRODUCTS_OF_SMALL
    return (
        inputs.dtype is torch.float32
        and weight_NK.dtype is torch.float32
        and inputs.device.type == "cpu"
        and inputs.numel() * weight_NK.shape[0] >= few
        and (bias_N is None or bias_N.dtype is torch.float32)
        and not hasattr(weight_NK, "placements")  # sharded over ranks (DTensor): only torch's own product handles it
        and not torch.is_autocast_enabled("cpu")
        # the compiler chooses among products of its own, and fails to lower this operator
        and not torch.compiler.is_compiling()
        and _onednn_answers()
    )


@cache
def _onednn_answers() -> bool:
    """Return true where this torch has the operator with the arguments used here and it multiplies correctly.

    The operator is private to torch, so a build without it, or with another signature, must cost
    speed and nothing else.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    left = torch.arange(12.0).reshape(4, 3)
    right = torch.arange(6.0).reshape(2, 3)
    try:
        with torch.no_grad():
            product = _onednn(left, right, torch.ones(2))
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool(torch.equal(product, left @ right.t() + 1))


@cache
def _onednn_packs() -> bool:
    """Return true where this torch lays a matrix out as `PackedMatrix` needs it; the operator is private too."""
    left, right = torch.arange(12.0).reshape(4, 3), torch.arange(6.0).reshape(2, 3)
    try:
        with torch.no_grad():
            packed = _packed(right)
            product, back = _onednn(left, packed, None), packed.to_dense()
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool(torch.equal(product, left @ right.t()) and torch.equal(back, right))
