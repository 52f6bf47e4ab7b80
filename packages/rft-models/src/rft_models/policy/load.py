"""Hugging Face directories -> policies. Local files, safetensors, no code from the directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rft_models.attention.kernels import choose_attention
from rft_models.attention.varlen import VarlenKernel
from rft_models.families import patches
from rft_models.families.vision import text_type
from rft_models.files.directories import checked_model_directory
from rft_models.files.finite_weights import require_finite
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.loading.transformers_loading import (
    Attention,
    auto_class_of,
    choose_packed,
    load_model,
    native_attention,
    prepare,
    refuse_other_kinds,
)
from rft_models.lora.quantization import four_bit_arguments
from rft_models.policy import freezing
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.freezing import FreezeRules
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_models.vision.processor import load_processor


def load_policy(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    gradient_checkpointing: Checkpointing | bool | None = None,
    attention: Attention = "auto",
    flash_attn: bool = False,
    freeze: FreezeRules | None = None,
    head_chunk_size: int | None = None,
    tokenizer: HfTokenizer | None = None,
    load_in_4bit: bool = False,
) -> CausalPolicy:
    """Load the causal or vision-language model in `directory`, patched for its `model_type`, in eval mode.

    Args:
        directory: a Hugging Face model directory (config.json, *.safetensors, tokenizer files).
        dtype: type of the weights.
        device: where they go.
        gradient_checkpointing: what is computed again in the backward pass (in `train()` mode); true = every layer.
        attention: "packed" attends inside packed segments, "native" pads segments and uses the
            model's own attention, "auto" takes packed for the families that are known to be exact.
        flash_attn: use the flash-attn package where it can run, see `attention.kernels`.
        freeze: what is left untrained, see `freezing`.
        head_chunk_size: rows whose logits are formed at a time, never whole in memory; None picks by size.
        tokenizer: a tokenizer that was loaded already (of a model that takes images an `HfProcessor`).
        load_in_4bit: hold the weights in 4 bits, see `lora.quantization`; adapters alone can then be trained.

    Raises:
        DataError: directory, configuration, weights or tokenizer absent, damaged or of another kind; a weight is NaN
            or infinite.
        OptionsError: attention="packed" for an architecture without it; `freeze` names nothing, or leaves nothing.
        PreflightError: the architecture computes something that is not known here; no GPU for weights in 4 bits.
    """
    more = four_bit_arguments(device, dtype) if load_in_4bit else {}
    path, config = checked_model_directory(directory)
    # all that the small files show is refused before the weights are read
    refuse_other_kinds(path, config, takes_images=True)
    tokenizer = tokenizer if tokenizer is not None else load_processor(path)
    packed = choose_packed(config["model_type"], attention, path, text_type=text_type(config))
    loaded = load_model(path, dtype, native_attention(config), auto_class=auto_class_of(config), more=more)
    model = patches.apply(loaded)
    if not load_in_4bit:  # its weights are loaded onto the device already (`four_bit_arguments`)
        model.to(device)
    require_finite(model.named_parameters(), path)
    policy = make_policy(
        model,
        tokenizer,
        packed=packed,
        gradient_checkpointing=gradient_checkpointing,
        head_chunk_size=head_chunk_size,
        kernel=choose_attention(device, dtype, flash_attn=flash_attn).kernel,
        where=str(path),
    )
    if freeze is not None and freeze.freezes:
        freezing.freeze(policy, freeze)
    return policy


def load_reference(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: Attention = "auto",
    flash_attn: bool = False,
    head_chunk_size: int | None = None,
    tokenizer: HfTokenizer | None = None,
) -> CausalPolicy:
    """`load_policy`, frozen: eval mode and no parameter requires a gradient."""
    policy = load_policy(
        directory,
        dtype=dtype,
        device=device,
        attention=attention,
        flash_attn=flash_attn,
        head_chunk_size=head_chunk_size,
        tokenizer=tokenizer,
    )
    policy.model.requires_grad_(False)
    return policy


def make_policy(
    model: Any,
    tokenizer: HfTokenizer | None,
    *,
    packed: bool,
    gradient_checkpointing: Checkpointing | bool | None = None,
    head_chunk_size: int | None = None,
    kernel: VarlenKernel | None = None,
    where: str = "model",
) -> CausalPolicy:
    """Build a policy from a transformers model in memory; checks it against the model's own forward."""
    prepare(model, packed=packed, gradient_checkpointing=gradient_checkpointing)
    policy = CausalPolicy(model, tokenizer, packed=packed, head_chunk_size=head_chunk_size, kernel=kernel, where=where)
    policy.verify()
    return policy
