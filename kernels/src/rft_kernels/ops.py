"""The entry: each operation by its kernel where Triton runs, by its torch reference elsewhere."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from rft_kernels import reference


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
    if logits_TV.dtype != torch.float64 and _triton_runs_on(logits_TV.device.type):
        from rft_kernels import triton_rows  # Triton is there on Linux only

        return triton_rows.selected_logprob_and_entropy(logits_TV, targets_T, temperature)
    return reference.selected_logprob_and_entropy(logits_TV, targets_T, temperature)


def _triton_runs_on(device_type: str) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device_type == "cuda" or interpreted) and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
