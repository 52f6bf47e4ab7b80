"""Choice of the code that runs the passes over a slab of logits: Triton kernels, compiled C++ or plain torch.

The only module that checks whether `rft_kernels` is installed. Kernels run on CUDA tensors of at most 32 bits;
on a CPU large heads are compiled where a C++ compiler is there; everything else is plain torch. The choice
depends on the device, the type and the number of logits alone, so that a resumed run makes the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from rft_models.logprobs.epilogue import EagerEpilogue, Epilogue, RowTerms, Shape
from rft_models.logprobs.epilogue_compiled import compiled_epilogue
from rft_models.logprobs.planned_device import ShapesOfKernels, device_type, is_planned
from rft_models.logprobs.row_statistics import SlabSums

EpilogueName = Literal["eager", "compiled", "kernels"]

COMPILE_FROM = 16_777_216
"""Logits of one call from which the passes are compiled: at four times as many a forward with its backward saves
90 ms of 812 in bfloat16 and 20 of 1425 in float32 on one thread; the compilation takes seconds once a process."""

_FUSED_WIDTH = 2048
"""Hidden sizes up to this one form products and sums in one kernel: the traffic of writing a slab and
reading it again, 92 b / D of the product's time at b bytes a logit, is above what such a kernel loses."""

_KERNELS = ("slab_sums", "slab_gradients", "fused_sums")


def choose_epilogue(like: Tensor, num_logits: int, shape: Shape, wanted: EpilogueName | None = None) -> Epilogue:
    """Choose the passes for hidden states such as `like`; `.name` is the choice and `.reason` its reason.

    `wanted` names one; where that cannot run, plain torch does, and the reason states it.
    """
    if wanted == "eager":
        return EagerEpilogue("asked for")
    if is_planned():
        # the same passes as the run's, on tensors that have shapes alone
        on_gpu = device_type(like) == "cuda" and like.dtype is not torch.float64
        return KernelEpilogue(ShapesOfKernels, "a plan for a GPU") if on_gpu else EagerEpilogue("a plan for a CPU")
    if like.is_cuda:
        # the kernels take types of at most 32 bits
        module = None if wanted == "compiled" or like.dtype is torch.float64 else _kernels()
        if module is not None:
            return KernelEpilogue(module, "CUDA tensors, and rft_kernels is installed")
        return EagerEpilogue("rft_kernels is not installed, or does not do this type")
    if wanted == "kernels" or like.device.type != "cpu":
        return EagerEpilogue(f"no kernels for {like.device.type} tensors")
    if wanted is None and num_logits < COMPILE_FROM:
        return EagerEpilogue(f"{num_logits} logits are too few to compile for ({COMPILE_FROM})")
    compiled = compiled_epilogue(like.dtype, shape)
    return EagerEpilogue(compiled) if isinstance(compiled, str) else compiled


@cache
def _kernels() -> ModuleType | None:
    """Return `rft_kernels.ops` where it is installed with the operations used here, else None."""
    try:
        from rft_kernels import ops
    except ImportError:
        return None
    return ops if all(hasattr(ops, name) for name in _KERNELS) else None


@dataclass(frozen=True, slots=True)
class KernelEpilogue:
    """Passes by the operations of `rft_kernels.ops`, which keep the products between the two passes."""

    module: ModuleType | type[ShapesOfKernels]
    reason: str
    name: str = "kernels"

    def sums(
        self, products_RC: Tensor, targets_R: Tensor, start: int, shape: Shape, *, moment: bool, argmax: bool
    ) -> tuple[SlabSums, Tensor]:
        """Compute the sums of a slab and return it as `gradients` takes it, see `Epilogue.sums`."""
        sums = self.module.slab_sums(
            products_RC, targets_R, start, temperature=shape.temperature, softcap=shape.softcap
        )
        return _wanted(sums, moment, argmax), products_RC

    def held(self, products_RC: Tensor, shape: Shape) -> Tensor:
        """Return the products unchanged: the kernels take them."""
        return products_RC

    def gradients(
        self,
        held_NC: Tensor,
        rows: RowTerms,
        share_N: Tensor,
        start: int,
        shape: Shape,
        dtype: torch.dtype,
        *,
        free: bool,
    ) -> Tensor:
        """Compute the gradient of the products, see `Epilogue.gradients`; in place where `free`."""
        # the kernel writes the gradient over the products
        return self.module.slab_gradients(
            *(held_NC if free else held_NC.clone(), rows.targets, start, rows.highest + rows.log_total),
            *(rows.entropy, rows.grad, rows.entropy_grad),
            **{"temperature": shape.temperature, "softcap": shape.softcap},
        )

    def fuses(self, hidden_RD: Tensor) -> bool:
        """Return true where `fused_sums` is faster than a product and `sums`."""
        return hidden_RD.shape[1] <= _FUSED_WIDTH

    def fused_sums(
        self,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        offset: int,
        shape: Shape,
        *,
        moment: bool,
        argmax: bool,
    ) -> SlabSums:
        """[S, R] sums of the whole matrix, no logit written; `offset` is the id of its first row."""
        sums = self.module.fused_sums(
            *(hidden_RD, weight_VD, targets_R),
            **{"temperature": shape.temperature, "softcap": shape.softcap, "bias_V": bias_V, "start": offset},
        )
        return _wanted(sums, moment, argmax)


def _wanted(sums: SlabSums, moment: bool, argmax: bool) -> SlabSums:
    return SlabSums(
        *(sums.highest, sums.total, sums.moment if moment else None),
        *(sums.target, sums.argmax if argmax else None),
    )


def add_product(total_NK: Tensor, left_NC: Tensor, right_CK: Tensor) -> bool:
    """total += left right with a float32 total and narrower factors, unrounded in between; False where torch cannot."""
    narrow = left_NC.dtype in (torch.bfloat16, torch.float16) and total_NK.dtype is torch.float32
    if not (total_NK.is_cuda and narrow and _adds_wide(left_NC.dtype)):
        return False
    torch.addmm(total_NK, left_NC, right_CK, out_dtype=torch.float32, out=total_NK)
    return True


@cache
def _adds_wide(dtype: torch.dtype) -> bool:
    """Return true where this torch adds a narrow product to a float32 matrix, tried on a product of ones."""
    ones, total = torch.ones(16, 16, device="cuda", dtype=dtype), torch.ones(16, 16, device="cuda")
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())  # 1 + 16 x 1 x 1: the product was added and not written over
