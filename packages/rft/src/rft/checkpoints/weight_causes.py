"""Settings of a model that explain why the weights of a checkpoint do not fit it, from configurations and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""Keys of a configuration that names and shapes follow from, as `transformers` calls them for every model."""
_VISION_KEYS = ("depth", "num_hidden_layers", "hidden_size", "intermediate_size", "patch_size", "out_hidden_size")
_MOST = 6
_LORA = re.compile(r"lora_A(\.|$)")


def causes(ours: object, theirs: object, our_shapes: Mapping[str, Any], their_shapes: Mapping[str, Any]) -> str:
    """Return the settings whose values differ, those of the checkpoint first, or "" where none explains it.

    Args:
        ours: configuration of the model that takes the weights.
        theirs: configuration of the checkpoint's model.
        our_shapes: shape of each tensor of the model.
        their_shapes: shape of each tensor in the checkpoint.
    """
    found = [*_of_the_configuration(ours, theirs), *_of_adapters(our_shapes, their_shapes)]
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + more


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _of_the_configuration(ours: object, theirs: object) -> Iterator[str]:
    for part, keys in (("text_config", _KEYS), ("vision_config", _VISION_KEYS)):
        # a model of texts alone is its own text part
        is_text = part == "text_config"
        mine, other = (getattr(config, part, config if is_text else None) for config in (ours, theirs))
        for key in keys:
            value, given = getattr(mine, key, None), getattr(other, key, None)
            # a key that follows from others where it is left out explains nothing
            if value != given and value is not None and given is not None:
                yield f"{key if is_text else f'{part}.{key}'} {given} (here {value})"


def _of_adapters(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    mine, other = ({shape[0] for name, shape in each.items() if _LORA.search(name)} for each in (ours, theirs))
    if mine != other:
        yield f"lora_rank {_ranks(other)} (here {_ranks(mine)})"


def _ranks(found: set[int]) -> str:
    return "/".join(map(str, sorted(found))) or "0"
