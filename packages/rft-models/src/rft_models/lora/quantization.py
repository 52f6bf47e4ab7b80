"""Weights held in 4 bits under adapters (QLoRA, Dettmers et al. 2023, arXiv 2305.14314): NF4 by bitsandbytes on a GPU.

Linear layers but the output matrix are rounded to 4 bits while they are loaded, with one scale for 64 weights (itself
rounded to 8 bits), and multiplied out again for every product. They are not trained. What is written is the model that
was computed with: the rounded weights as ordinary numbers, adapters folded in. Not run on a GPU yet.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rft_core.errors import OptionsError, PreflightError
from rft_models.lora.merge import to_plain_tensor

_WHY = "weights in 4 bits are multiplied by kernels of bitsandbytes on a CUDA GPU"


def four_bit_arguments(device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of transformers' `from_pretrained`: NF4 with products in `dtype`.

    Raises:
        OptionsError: no CUDA GPU.
        PreflightError: bitsandbytes is not installed.
    """
    on_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    if not on_gpu:
        raise OptionsError(
            code="adapters.4bit_device",
            what=f"load_in_4bit on {device}",
            where="--load_in_4bit",
            why=_WHY,
            state="nothing was loaded",
            do="leave load_in_4bit out, or use --device cuda on a machine with a GPU",
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise PreflightError(
            code="adapters.no_bitsandbytes",
            what="load_in_4bit needs bitsandbytes, which is not installed in this environment",
            where="--load_in_4bit",
            why=_WHY,
            state="nothing was loaded",
            do="uv pip install bitsandbytes, or leave load_in_4bit out",
        )
    from transformers import BitsAndBytesConfig

    chosen = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": chosen, "device_map": {"": torch.device(device)}}


def is_quantized(model: Any) -> bool:
    """Return true where some of a transformers model's weights are quantized."""
    return getattr(model, "hf_quantizer", None) is not None


def state_of(model: Any) -> dict[str, Tensor]:
    """Return a model's state, with quantized weights dequantized."""
    if not is_quantized(model):
        return model.state_dict()
    return {name: to_plain_tensor(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}


@contextmanager
def saved_as_numbers(model: Any) -> Iterator[None]:
    """Make `save_pretrained` write the state passed to it, and a configuration without quantization."""
    if not is_quantized(model):
        yield
        return
    quantizer, chosen = model.hf_quantizer, model.config.quantization_config
    model.hf_quantizer = None
    del model.config.quantization_config
    try:
        yield
    finally:
        model.hf_quantizer, model.config.quantization_config = quantizer, chosen
