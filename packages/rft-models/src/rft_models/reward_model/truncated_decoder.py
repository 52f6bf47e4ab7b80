"""A decoder that ends behind one of its layers: what a probing head reads."""

from __future__ import annotations

from typing import Any

from torch import nn

from rft_core.errors import OptionsError


def truncate_decoder(decoder: Any, layer: int, where: str) -> None:
    """Drop the layers above `layer` (counted from 1) and let the states pass the final norm unchanged.

    What is left computes transformers' `hidden_states[layer]` (for the last layer: before the norm) and is a
    whole decoder of its kind with fewer layers. The norm keeps its weights and trains none of them.

    Raises:
        OptionsError: there is no such layer, or the decoder does not name its layers and norm as most do.
    """
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
        raise OptionsError(
            code="models.reward_layer_unknown",
            what=f"{type(decoder).__name__} has no `layers` with a `norm` after them",
            where=where,
            why="a head on a layer needs the list of layers and the final norm",
            do="leave the layer out: the head then reads the last state",
        )
    if layer > len(layers):
        raise OptionsError(
            code="models.reward_layer",
            what=f"layer {layer} of a model with {len(layers)} layers",
            where=where,
            why="layers are counted from 1",
            do=f"layer {len(layers)}",
        )
    decoder.layers = layers[:layer]
    _fit_config(decoder.config.get_text_config(decoder=True), layer)
    # the norm stays and is passed by: without it the decoder would have other tensors than its architecture
    norm.requires_grad_(False)
    norm.register_forward_hook(_unchanged)


def _fit_config(config: Any, layer: int) -> None:
    """Change the configuration to that of a model with `layer` layers."""
    config.num_hidden_layers = layer
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layer]
    if getattr(config, "max_window_layers", None) is not None:
        config.max_window_layers = min(config.max_window_layers, layer)


def _unchanged(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
    return arguments[0]
