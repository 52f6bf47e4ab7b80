"""The first weights of a new decoder: normal, each from its own key, smaller where they are added to the residual."""

from __future__ import annotations

import math

import torch
from torch import nn

from rft_core.keyed_random import derive_key, keyed_normal

_RESIDUAL_OUTPUTS = ("o_proj", "down_proj")
"""The last matrices of attention and of the feed-forward part, by the names that all families share."""
_ROUTERS = ("gate", "shared_expert_gate")
_ROUTER_STD = 0.01
"""Small, so that training begins with experts used alike."""


@torch.no_grad()
def draw_decoder_weights(model: nn.Module, *, seed: int, std: float, num_layers: int) -> None:
    """Set every parameter from (seed, name): matrices Normal(0, std^2), norms 1, biases 0.

    The matrices whose products are added to the residual are drawn with std / sqrt(2 num_layers): the residual is a
    sum of 2 num_layers of them, whose variance then does not grow with the depth (GPT-2, Radford et al. 2019,
    section 2.3). Routers are drawn with 0.01 at most.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        normal = keyed_normal(parameter.shape, derive_key(seed, f"weight:{name}"))
        parameter.copy_(normal * _std_of(name, std, num_layers))


def _std_of(name: str, std: float, num_layers: int) -> float:
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module in _RESIDUAL_OUTPUTS:
        return std / math.sqrt(2 * num_layers)
    return min(std, _ROUTER_STD) if module in _ROUTERS else std
