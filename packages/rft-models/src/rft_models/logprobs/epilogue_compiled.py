"""The passes over a slab as C++ that Inductor writes: one reading of the slab where plain torch takes four.

A forward with its backward of 2048 x 512 x 32000 on one thread of a Zen 5 core: 812 -> 720 ms in bfloat16, 1425 ->
1403 in float32. Compiling takes 10 to 20 seconds once a machine and about 5 a process from then on, so that only
large heads use it (`rft_models.logprobs.backend.choose_epilogue`). Shapes are symbolic: one compilation serves all rows
and slabs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rft_models.logprobs.epilogue import EagerEpilogue, RowTerms, Shape, columns, write_targets
from rft_models.logprobs.row_statistics import SlabSums

TOLERANCE = 1e-5
_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True, slots=True)
class CompiledEpilogue:
    """Compiled passes, which keep the products themselves between the two passes, in their own type."""

    reason: str
    name: str = "compiled"

    def sums(
        self, products_RC: Tensor, targets_R: Tensor, start: int, shape: Shape, *, moment: bool, argmax: bool
    ) -> tuple[SlabSums, Tensor]:
        """Compute the sums of a slab and return its products, see `Epilogue.sums`."""
        scale, cap = _scalars(shape)
        highest_R, total_R, moment_R = _compiled(_sums)(products_RC, scale, cap, moment)
        inside_R, column_R1 = columns(targets_R, start, products_RC.shape[1])
        target_R = _scaled(products_RC.gather(1, column_R1)[:, 0], scale, cap)
        argmax_R = products_RC.argmax(1) + start if argmax else None
        target_R = torch.where(inside_R, target_R, -torch.inf)
        return SlabSums(highest_R, total_R, moment_R, target_R, argmax_R), products_RC

    def held(self, products_RC: Tensor, shape: Shape) -> Tensor:
        """Return the products unchanged: the gradients are computed from them."""
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
        """Compute the gradient of the products in place, or in a copy unless `free`, and in their type."""
        assert dtype is held_NC.dtype
        slopes_NC = held_NC if free else held_NC.clone()
        scale, cap = _scalars(shape)
        # the temperature divides one number a row and not the whole slab
        row = (rows.highest, rows.log_total, rows.grad / shape.temperature)
        if rows.entropy_grad is None:
            _compiled(_slopes_)(slopes_NC, scale, cap, *row)
        else:
            more = (rows.entropy_grad / shape.temperature, rows.entropy)
            _compiled(_slopes_with_entropy_)(slopes_NC, scale, cap, *row, *more)
        return write_targets(slopes_NC, rows, start, shape)


def _scaled(products: Tensor, scale: Tensor, cap: Tensor | None) -> Tensor:
    logits = products.float()
    return (logits if cap is None else cap * torch.tanh(logits / cap)) * scale


def _sums(
    products_RC: Tensor, scale: Tensor, cap: Tensor | None, with_moment: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    logits_RC = _scaled(products_RC, scale, cap)
    highest_R = logits_RC.amax(1)
    below_RC = logits_RC - highest_R[:, None]
    weights_RC = below_RC.exp()
    return highest_R, weights_RC.sum(1), (weights_RC * below_RC).sum(1) if with_moment else None


def _slopes_(
    products_NC: Tensor, scale: Tensor, cap: Tensor | None, highest_N: Tensor, log_total_N: Tensor, grad_N: Tensor
) -> None:
    logits_NC = _scaled(products_NC, scale, cap)
    slopes_NC = -(logits_NC - highest_N[:, None] - log_total_N[:, None]).exp() * grad_N[:, None]
    products_NC.copy_(_through_cap(slopes_NC, logits_NC, scale, cap))


def _slopes_with_entropy_(
    products_NC: Tensor,
    scale: Tensor,
    cap: Tensor | None,
    highest_N: Tensor,
    log_total_N: Tensor,
    grad_N: Tensor,
    entropy_grad_N: Tensor,
    entropy_N: Tensor,
) -> None:
    logits_NC = _scaled(products_NC, scale, cap)
    logprobs_NC = logits_NC - highest_N[:, None] - log_total_N[:, None]
    coefficient_NC = grad_N[:, None] + entropy_grad_N[:, None] * (logprobs_NC + entropy_N[:, None])
    products_NC.copy_(_through_cap(-logprobs_NC.exp() * coefficient_NC, logits_NC, scale, cap))


def _through_cap(slopes_NC: Tensor, logits_NC: Tensor, scale: Tensor, cap: Tensor | None) -> Tensor:
    if cap is None:
        return slopes_NC
    tanh_NC = logits_NC / (scale * cap)
    return slopes_NC * (1 - tanh_NC * tanh_NC)


@cache
def _scalars(shape: Shape) -> tuple[Tensor, Tensor | None]:
    # tensors, so that the temperature is an input of the compiled code and not a constant in it
    return torch.tensor(1.0 / shape.temperature), None if shape.softcap is None else torch.tensor(shape.softcap)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # types, caps, wanted sums and slabs above 4096 columns are code of their own: more than the 8 that is usual
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=True, fullgraph=True)


@cache
def compiled_epilogue(dtype: torch.dtype, shape: Shape) -> CompiledEpilogue | str:
    """Return the compiled passes, once they were compiled and agreed with plain torch, or why they cannot be used."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{dtype} is computed by plain torch"
    if not any(shutil.which(name) for name in _COMPILERS):
        return f"no C++ compiler on PATH ({', '.join(_COMPILERS)})"
    threads = torch.get_num_threads()
    try:
        with torch.no_grad():
            apart = _disagreement(dtype, shape)
    except (RuntimeError, ImportError, OSError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"torch.compile failed: {type(error).__name__}: {first[:200]}"
    finally:
        torch.set_num_threads(threads)  # a first compilation can leave this thread's OpenMP at one thread
    if not apart <= TOLERANCE:  # true for NaN as well
        return f"compiled code is {apart:.1e} apart from plain torch"
    return CompiledEpilogue("a C++ compiler is there")


def _disagreement(dtype: torch.dtype, shape: Shape) -> float:
    """Measure the largest difference from plain torch on one slab, with and without the entropy's gradient."""
    generator = torch.Generator().manual_seed(0)
    # prime sizes, which no vector width divides: the ends of the compiled loops are compared too
    products_RC = torch.randn(37, 83, generator=generator).mul_(3).to(dtype)
    targets_R = torch.randint(0, 100, (37,), generator=generator)
    ours, plain = CompiledEpilogue(""), EagerEpilogue("")
    apart: list[Tensor] = []
    for with_entropy in (False, True):
        results: list[list[Tensor]] = []
        for epilogue in (plain, ours):
            products = products_RC.clone()  # `sums` uses them up
            sums, slab = epilogue.sums(products, targets_R, 0, shape, moment=with_entropy, argmax=False)
            log_total_R = sums.total.log()
            # some targets are in no column of this slab: their -inf would make the terms of the entropy NaN
            logprobs_R = (sums.target - sums.highest - log_total_R).clamp(min=-50)
            grad_R = torch.linspace(-1, 1, 37)
            rows = RowTerms(
                *(targets_R, logprobs_R, sums.highest, log_total_R, grad_R.square()),
                *(grad_R, grad_R.flip(0) if with_entropy else None),
            )
            slopes = epilogue.gradients(
                slab, rows, torch.zeros(37), 0, shape, torch.float32 if epilogue is plain else dtype, free=False
            )
            results.append(
                [log_total_R, slopes.to(dtype).float(), *([] if sums.moment is None else [sums.moment / sums.total])]
            )
        # where bfloat16 rounds to either side of a boundary the two are one unit of it apart
        allowed = [0.0, 0.0 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps, 0.0]
        for one, other, slack in zip(*results, allowed[: len(results[0])], strict=True):
            apart.append(((one - other).abs() - slack * one.abs()).amax())
    return float(torch.stack(apart).amax())  # NaN stays NaN, which Python's max would lose
