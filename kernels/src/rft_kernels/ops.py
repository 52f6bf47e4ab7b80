"""The entry: each operation by its kernel where Triton runs, by its torch reference elsewhere."""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

from rft_kernels.reference import logprobs
from rft_kernels.reference import vocab_slabs as reference_slabs
from rft_kernels.row_statistics import IGNORED, RowSums, SlabSums

__all__ = [
    "IGNORED",
    "RowSums",
    "SlabSums",
    "fused_sums",
    "join_sums",
    "merge_sums",
    "selected_logprob_and_entropy",
    "slab_gradients",
    "slab_sums",
]


def selected_logprob_and_entropy(
    logits_TV: Tensor, targets_T: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of one token a row, entropy of the row and its log-sum-exp, of softmax(logits / temperature).

    The Triton kernel runs for CUDA tensors of at most 32 bits, and for CPU tensors under Triton's
    interpreter (`TRITON_INTERPRET=1`, which is for tests); `reference.selected_logprob_and_entropy`,
    where the equations are, runs for everything else. Both are differentiable once.

    Args:
        logits_TV: [T, V] any floating type; -inf forbids a token, a row needs one finite logit.
        targets_T: [T] int64 in 0..V-1.
        temperature: positive.

    Returns:
        logprobs_T, entropy_T and lse_T, [T] each, float32 (float64 for float64 logits), in nats.
    """
    if _by_kernel(logits_TV):
        from rft_kernels.triton import row_kernels  # Triton is there on Linux only

        return row_kernels.selected_logprob_and_entropy(logits_TV, targets_T, temperature)
    return logprobs.selected_logprob_and_entropy(logits_TV, targets_T, temperature)


def slab_sums(
    products_RC: Tensor,
    targets_R: Tensor,
    start: int,
    *,
    temperature: float,
    softcap: float | None = None,
    bias_C: Tensor | None = None,
) -> SlabSums:
    """Five numbers a row of one slab of the vocabulary, read once; `merge_sums` makes log-probs of all slabs'.

    Equations and arguments are those of `reference_slabs.slab_sums`: products h W^T [R, C] of entries
    start .. start + C, int64 targets [R] in the whole vocabulary or `IGNORED`. Any C; nothing beyond
    column C is read. Sums are float32 (float64 for float64 products). Not differentiable: the
    gradient is `slab_gradients`.
    """
    options = {"temperature": temperature, "softcap": softcap, "bias_C": bias_C}
    return _slabs(products_RC).slab_sums(products_RC, targets_R, start, **options)


def join_sums(parts: SlabSums | list[SlabSums]) -> SlabSums:
    """Five numbers a row of several parts together, to send to other ranks, see `reference_slabs.join_sums`."""
    return _merges(parts).join_sums(parts)


def merge_sums(parts: SlabSums | list[SlabSums]) -> RowSums:
    """Normalizer, log-prob, entropy and argmax of each row from parts that cover the vocabulary.

    Parts may be slabs, splits of `fused_sums` or shards of ranks, stacked [S, R] or a list; they are added
    in their order. See `reference_slabs.merge_sums`.
    """
    return _merges(parts).merge_sums(parts)


def slab_gradients(
    products_RC: Tensor,
    targets_R: Tensor,
    start: int,
    normalizer_R: Tensor,
    entropy_R: Tensor,
    grad_R: Tensor,
    entropy_grad_R: Tensor | None,
    *,
    temperature: float,
    softcap: float | None = None,
    bias_C: Tensor | None = None,
) -> Tensor:
    """Gradient of the loss by the products, written over them; rows whose target is `IGNORED` get 0.

    Equations and arguments are those of `reference_slabs.slab_gradients`; a gradient by the entropy
    of None costs nothing. A row of `products_RC` must be contiguous, rows may be strided.
    """
    numbers = (normalizer_R, entropy_R, grad_R, entropy_grad_R)
    options = {"temperature": temperature, "softcap": softcap, "bias_C": bias_C}
    return _slabs(products_RC).slab_gradients(products_RC, targets_R, start, *numbers, **options)


def fused_sums(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    *,
    temperature: float,
    softcap: float | None = None,
    bias_V: Tensor | None = None,
    start: int = 0,
    splits: int | None = None,
) -> SlabSums:
    """`slab_sums` of hidden states and output matrix [V, D], the products formed in the kernel and never written.

    Products are float32, never rounded to bfloat16. Meant for hidden widths up to 2048, where writing
    and reading slabs costs more than a library's faster product saves. Arguments are those of
    `reference_slabs.fused_sums`.

    Returns:
        `SlabSums` of [S, R] for `merge_sums` or `join_sums`.
    """
    options = {"temperature": temperature, "softcap": softcap, "bias_V": bias_V, "start": start, "splits": splits}
    if _by_kernel(hidden_RD):
        from rft_kernels.triton import fused_logprobs  # Triton is there on Linux only

        return fused_logprobs.fused_sums(hidden_RD, weight_VD, targets_R, **options)
    return reference_slabs.fused_sums(hidden_RD, weight_VD, targets_R, **options)


def _slabs(tensor: Tensor) -> ModuleType:
    """The module whose operations on slabs suit the tensor."""
    if not _by_kernel(tensor):
        return reference_slabs
    from rft_kernels.triton import vocab_slabs as triton_slabs  # Triton is there on Linux only

    return triton_slabs


def _merges(parts: SlabSums | list[SlabSums]) -> ModuleType:
    """The module whose merges suit the parts."""
    if not _by_kernel(parts.highest if isinstance(parts, SlabSums) else parts[0].highest):
        return reference_slabs
    from rft_kernels.triton import merge  # Triton is there on Linux only

    return merge


def _by_kernel(tensor: Tensor) -> bool:
    """A kernel would round float64, so that goes to the reference everywhere."""
    return tensor.dtype != torch.float64 and _triton_runs_on(tensor.device.type)


def _triton_runs_on(device_type: str) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device_type == "cuda" or interpreted) and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    # looked for and not imported: only a kernel that runs needs it
    return importlib.util.find_spec("triton") is not None
