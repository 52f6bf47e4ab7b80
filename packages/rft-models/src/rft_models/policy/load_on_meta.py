"""A model whose parameters have shapes and no memory, until each rank reads its shards.

What is not a parameter (the frequencies of rotary positions) is computed as in a model that is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rft_core.errors import OptionsError
from rft_models.attention.kernels import choose_attention
from rft_models.families import patches
from rft_models.families.vision import text_type
from rft_models.files.checkpoint_names import names_in_files
from rft_models.files.directories import checked_model_directory
from rft_models.files.safetensors_reader import WeightFiles, shapes_of
from rft_models.files.transformers_config import hf_config, refusals
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.loading.transformers_loading import (
    auto_class_of,
    choose_packed,
    native_attention,
    prepare,
    refuse_other_kinds,
)
from rft_models.policy import freezing
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.freezing import FreezeRules
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_models.vision.processor import load_processor

_META = torch.device("meta")


def load_on_meta(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    gradient_checkpointing: Checkpointing | bool | None = None,
    flash_attn: bool = False,
    freeze: FreezeRules | None = None,
    head_chunk_size: int | None = None,
    tokenizer: HfTokenizer | None = None,
) -> CausalPolicy:
    """Load a policy without its weights: `policy.pending_weights` holds them for the code that allocates parameters.

    `policy.verify()` is left to do when they have come. Arguments and errors are those of `load_policy`.

    Raises:
        OptionsError: the tensors in the files are not those of the model, one for one.
    """
    path, config = checked_model_directory(directory)
    refuse_other_kinds(path, config, takes_images=True)
    tokenizer = tokenizer if tokenizer is not None else load_processor(path)
    packed = choose_packed(config["model_type"], "auto", path, text_type=text_type(config))
    model = patches.apply(_empty_model(path, config, dtype))
    # `MetaParameters` reaches what `torch.empty` makes; gains of norms are made of ones
    with refusals(path, RuntimeError):
        _drop_memory(model)
    _place_buffers(model, torch.device(device), path)
    files = WeightFiles(path)
    files.rename(names_in_files(model, files.names()))
    files.refuse_others(shapes_of(model))
    prepare(model, packed=packed, gradient_checkpointing=gradient_checkpointing)
    kernel = choose_attention(device, dtype, flash_attn=flash_attn).kernel
    policy = CausalPolicy(
        model, tokenizer, packed=packed, head_chunk_size=head_chunk_size, kernel=kernel, where=str(path)
    )
    # the files stay open: whoever allocates the parameters reads each rank's blocks and closes them
    policy.pending_weights = files
    if freeze is not None and freeze.freezes:
        freezing.freeze(policy, freeze)
    return policy


def load_reference_on_meta(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    flash_attn: bool = False,
    head_chunk_size: int | None = None,
) -> CausalPolicy:
    """`load_on_meta`, frozen: eval mode and no parameter requires a gradient."""
    policy = load_on_meta(directory, dtype=dtype, device=device, flash_attn=flash_attn, head_chunk_size=head_chunk_size)
    policy.model.requires_grad_(False)
    return policy


def _empty_model(path: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Build the architecture of the directory as transformers does, with its generation settings."""
    import transformers

    attention = native_attention(config)
    read = hf_config(path, attention)
    with refusals(path, RuntimeError), MetaParameters():
        model: Any = getattr(transformers, auto_class_of(config)).from_config(
            read, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    if (path / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(str(path), local_files_only=True)
    return model


class MetaParameters(TorchFunctionMode):
    """Torch mode in which `torch.empty` makes meta tensors; tensors that are computed keep their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is torch.empty:
            named["device"] = _META
        return func(*args, **named)


def _drop_memory(model: nn.Module) -> None:
    """Take the memory of the parameters that have some (gains of norms); tied ones stay tied."""
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                continue
            if id(parameter) not in empty:
                empty[id(parameter)] = nn.Parameter(parameter.to(_META), requires_grad=parameter.requires_grad)
            setattr(module, name, empty[id(parameter)])


def _place_buffers(model: nn.Module, device: torch.device, path: Path) -> None:
    for where, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                raise OptionsError(
                    code="models.meta_buffer",
                    what=f"{where}.{name} {list(buffer.shape)} is not a parameter, and its values are only in the file",
                    where=f"--meta_init with {path}",
                    why="only parameters are read in blocks",
                    do="leave --meta_init out: the weights are then loaded whole and distributed",
                )
            setattr(module, name, buffer.to(device))
