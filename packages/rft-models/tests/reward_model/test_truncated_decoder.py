"""A decoder that ends behind a layer: what is left of it and of its configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import OptionsError
from rft_models.reward_model.truncated_decoder import truncate_decoder


class Decoder(nn.Module):
    """Layers that add their number, and a norm that doubles."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Add(number) for number in (1, 2, 4)])
        self.norm = nn.Linear(1, 1)
        text = SimpleNamespace(num_hidden_layers=3, **config)

        def text_config(*, decoder: bool) -> Any:
            assert decoder
            return text

        self.config, self.text = SimpleNamespace(get_text_config=text_config), text

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = layer(states)
        return self.norm(states)


class Add(nn.Module):
    """A layer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, states: Tensor) -> Tensor:
        return states + self.number


@pytest.mark.parametrize(("layer", "expected"), [(1, 1.0), (2, 3.0), (3, 7.0)])
def test_the_states_behind_a_layer_pass_the_norm_unchanged(layer: int, expected: float) -> None:
    decoder = Decoder()
    truncate_decoder(decoder, layer, "here")
    assert float(decoder(torch.zeros(1, 1))) == expected
    assert len(decoder.layers) == layer
    assert not any(parameter.requires_grad for parameter in decoder.norm.parameters())
    assert vars(decoder.text) == {"num_hidden_layers": layer}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"layer_types": ["a", "b", "c"]}, {"layer_types": ["a", "b"]}),
        ({"layer_types": None, "max_window_layers": None}, {"layer_types": None, "max_window_layers": None}),
        ({"max_window_layers": 3}, {"max_window_layers": 2}),
        ({"max_window_layers": 1}, {"max_window_layers": 1}),
        ({"max_window_layers": 0}, {"max_window_layers": 0}),
    ],
)
def test_the_configuration_is_that_of_fewer_layers(config: dict[str, Any], expected: dict[str, Any]) -> None:
    decoder = Decoder(**config)
    truncate_decoder(decoder, 2, "here")
    assert vars(decoder.text) == {"num_hidden_layers": 2} | expected


def without(name: str) -> Decoder:
    decoder = Decoder()
    setattr(decoder, name, None)
    return decoder


@pytest.mark.parametrize(
    ("decoder", "layer", "code"),
    [
        (Decoder(), 4, "models.reward_layer"),
        (without("layers"), 1, "models.reward_layer_unknown"),
        (without("norm"), 1, "models.reward_layer_unknown"),
        (SimpleNamespace(), 1, "models.reward_layer_unknown"),
    ],
)
def test_a_layer_that_is_not_there_is_refused(decoder: Any, layer: int, code: str) -> None:
    with pytest.raises(OptionsError) as caught:
        truncate_decoder(decoder, layer, "here")
    assert (caught.value.problem.code, caught.value.problem.where) == (code, "here")
