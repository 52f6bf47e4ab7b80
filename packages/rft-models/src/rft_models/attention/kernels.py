"""Choice of the kernel that computes the packed attention, with the reason in words.

In order: the flash-attn package where it is requested and can run, torch's own varlen attention on a GPU in half
precision, and everywhere else the fused attention of torch on blocks of similar length (`packed_attention`), which
is exact for every dtype. A call that the chosen kernel does not take (softcapping, dropout, odd head sizes) goes to
the blocks too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rft_models.attention.varlen import Sequences, VarlenKernel
from rft_models.families.registry import packs
from rft_models.families.vision import is_vision

_HALF = (torch.bfloat16, torch.float16)
_WIDEST_HEAD = 256
_OLDEST = (8, 0)
"""Compute capability from which flash attention runs."""
_BLOCKS = "torch's fused attention on blocks of similar length, exact"


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Chosen kernel, and its description for people."""

    kernel: VarlenKernel | None
    """None: blocks."""
    description: str


@dataclass(frozen=True, slots=True)
class TorchVarlen:
    """`torch.nn.attention.varlen.varlen_attn`: no softcapping and no dropout."""

    function: Callable[..., Any]

    def takes(self, query_THD: Tensor, value_SGD: Tensor, *, softcap: float | None, dropout: float) -> bool:
        """Return true without softcapping and dropout, for CUDA tensors of half precision, see `_suits`."""
        return softcap is None and dropout == 0.0 and _suits(query_THD, value_SGD)

    def __call__(
        self,
        query_THD: Tensor,
        key_SGD: Tensor,
        value_SGD: Tensor,
        sequences: Sequences,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        dropout: float,
    ) -> Tensor:
        """Compute attention by `varlen_attn`, see `VarlenKernel.__call__`."""
        assert softcap is None
        assert dropout == 0.0
        return self.function(
            query_THD,
            key_SGD,
            value_SGD,
            sequences.query_starts_N1,
            sequences.key_starts_N1,
            sequences.longest_query,
            sequences.longest_key,
            scale=scaling,
            window_size=_window(sliding_window),
            enable_gqa=query_THD.shape[1] != key_SGD.shape[1],
        )


@dataclass(frozen=True, slots=True)
class FlashAttn:
    """`flash_attn_varlen_func` of the flash-attn package: softcapping and dropout too, one of them at a time."""

    function: Callable[..., Any]

    def takes(self, query_THD: Tensor, value_SGD: Tensor, *, softcap: float | None, dropout: float) -> bool:
        """Return true unless softcapping meets dropout, for CUDA tensors of half precision, see `_suits`."""
        return (softcap is None or dropout == 0.0) and _suits(query_THD, value_SGD)

    def __call__(
        self,
        query_THD: Tensor,
        key_SGD: Tensor,
        value_SGD: Tensor,
        sequences: Sequences,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        dropout: float,
    ) -> Tensor:
        """Compute attention by `flash_attn_varlen_func`, see `VarlenKernel.__call__`."""
        return self.function(
            query_THD,
            key_SGD,
            value_SGD,
            cu_seqlens_q=sequences.query_starts_N1,
            cu_seqlens_k=sequences.key_starts_N1,
            max_seqlen_q=sequences.longest_query,
            max_seqlen_k=sequences.longest_key,
            dropout_p=dropout,
            softmax_scale=scaling,
            causal=True,
            window_size=_window(sliding_window),
            softcap=softcap or 0.0,
        )


def choose_attention(device: torch.device | str, dtype: torch.dtype, *, flash_attn: bool = False) -> AttentionChoice:
    """Choose the kernel for weights of this dtype on this device; `flash_attn` requests the package."""
    device = torch.device(device)
    without = _reason_against_fused(device, dtype)
    if without:
        return AttentionChoice(None, _BLOCKS + (f"; flash_attn has no effect: {without}" if flash_attn else ""))
    reason = ""
    if flash_attn:
        package, reason = _package()
        if package is not None:
            return AttentionChoice(FlashAttn(package), "varlen attention of the flash-attn package (flash_attn)")
        reason = f"; flash_attn: {reason}"
    own, missing = _torchs_own()
    if own is not None:
        return AttentionChoice(TorchVarlen(own), f"torch's varlen flash attention{reason}")
    return AttentionChoice(None, f"{_BLOCKS}; {missing}{reason}")


def describe_attention(
    model_type: str, device: torch.device | str, dtype: torch.dtype, *, flash_attn: bool, text_type: str = ""
) -> str:
    """Describe the attention of a run with such a model, before anything is loaded.

    `text_type` as in `transformers_loading.choose_packed`.
    """
    if packs(model_type) or (is_vision(model_type) and packs(text_type)):
        return choose_attention(device, dtype, flash_attn=flash_attn).description
    idle = f"; flash_attn has no effect: packing is not known to be exact for {model_type}" if flash_attn else ""
    return f"{model_type}'s own, on segments padded into blocks of similar length{idle}"


def _reason_against_fused(device: torch.device, dtype: torch.dtype) -> str:
    """Return why no varlen kernel can run here; empty where one can."""
    if device.type != "cuda":
        return f"flash attention runs on CUDA, the device is {device.type}"
    if dtype not in _HALF:
        return f"flash attention takes half precision, the weights are {str(dtype).removeprefix('torch.')} (--bf16)"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return f"flash attention needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    return ""


def _package() -> tuple[Callable[..., Any] | None, str]:
    """`flash_attn_varlen_func`, or why it is not there."""
    if find_spec("flash_attn") is None:
        return None, "the package is not installed (pip install flash-attn --no-build-isolation)"
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore
    except (ImportError, OSError) as error:  # a build for another torch or CUDA is found and does not load
        return None, f"the package does not load: {str(error).splitlines()[0]}"
    return flash_attn_varlen_func, ""


def _torchs_own() -> tuple[Callable[..., Any] | None, str]:
    """torch's `varlen_attn` where it has the arguments used here, or why not."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, f"torch {torch.__version__} has no varlen attention"
    # the arguments decide and not the version number: a build may have them earlier or later
    if not {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters):
        return None, f"the varlen attention of torch {torch.__version__} takes no sliding window"
    return varlen_attn, ""


def _suits(query_THD: Tensor, value_SGD: Tensor) -> bool:
    width = query_THD.shape[-1]
    same = value_SGD.shape[-1] == width
    # asked at every call: under autocast or with odd heads a layer may differ from what was chosen at the start
    return query_THD.is_cuda and query_THD.dtype in _HALF and same and width % 8 == 0 and width <= _WIDEST_HEAD


def _window(sliding_window: int | None) -> tuple[int, int]:
    """(keys to the left, keys to the right) beside a query's own; a window counts the query itself."""
    return (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
