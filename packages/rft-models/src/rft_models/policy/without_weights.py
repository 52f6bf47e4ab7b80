"""A policy of a configuration alone: config.json is read, no weight, and no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_models.families import patches
from rft_models.families.vision import text_type
from rft_models.files.directories import read_config
from rft_models.files.transformers_config import hf_config, refusals
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.loading.transformers_loading import auto_class_of, choose_packed, native_attention, prepare
from rft_models.policy import freezing
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.freezing import FreezeRules
from rft_models.policy.load_on_meta import MetaParameters


def policy_without_weights(
    directory: str | Path,
    *,
    dtype: torch.dtype,
    placed: Callable[[Tensor], Tensor],
    num_layers: int | None = None,
    adapted: Callable[[CausalPolicy], None] = lambda policy: None,
    gradient_checkpointing: Checkpointing | None = None,
    freeze: FreezeRules | None = None,
    head_chunk_size: int | None = None,
) -> CausalPolicy:
    """Make the policy that the configuration in `directory` describes, in train mode, with parameters from `placed`.

    Args:
        directory: holds config.json.
        dtype: type of the weights.
        placed: gives the tensor of a parameter, from one on the meta device.
        num_layers: layers of the decoder, in place of the configuration's.
        adapted: puts adapters into it.
        gradient_checkpointing, freeze, head_chunk_size: as of `load_policy`.

    Raises:
        DataError: no configuration that a model can be made with.
        OptionsError: `freeze` names nothing, or leaves nothing.
    """
    path = Path(directory)
    config = read_config(path)
    model = patches.apply(_empty_model(path, config, dtype, num_layers))
    _replace_parameters(model, lambda parameter: parameter.to("meta"))
    packed = choose_packed(config["model_type"], "auto", path, text_type=text_type(config))
    prepare(model, packed=packed, gradient_checkpointing=gradient_checkpointing)
    policy = CausalPolicy(model, None, packed=packed, head_chunk_size=head_chunk_size, where=str(path))
    policy.pending_weights = _Zeros()  # pyright: ignore[reportAttributeAccessIssue]  # what adapters read of files
    adapted(policy)
    policy.pending_weights = None
    _replace_parameters(model, placed)
    if freeze is not None and freeze.freezes:
        freezing.freeze(policy, freeze)
    return policy.train()


def _empty_model(path: Path, config: dict[str, Any], dtype: torch.dtype, num_layers: int | None) -> Any:
    import transformers

    attention = native_attention(config)
    read = hf_config(path, attention)
    if num_layers is not None:
        _keep_layers(read.get_text_config(decoder=True), num_layers)
    with refusals(path, RuntimeError), MetaParameters():
        return getattr(transformers, auto_class_of(config)).from_config(
            read, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )


def _keep_layers(config: Any, num_layers: int) -> None:
    config.num_hidden_layers = num_layers
    # some families list the kind of each layer
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


class _Zeros:
    """Files whose weights are all zero."""

    def block(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return zeros of this shape, which take no memory."""
        del name, start
        return torch.zeros(()).expand(*shape)

    def close(self) -> None:
        """There is nothing to close."""


def _replace_parameters(model: nn.Module, placed: Callable[[Tensor], Tensor]) -> None:
    """Put other tensors in the place of the parameters; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(placed(parameter), requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
