"""Operations of training, by formula against counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rft_models.backbone.training_flops import TrainingFlops, training_flops

Build = Callable[..., Any]


def counted(model: Any) -> TrainingFlops:
    decoder = model.get_decoder()
    return training_flops(decoder.layers, model.get_output_embeddings().weight, model.config)


@pytest.mark.parametrize(
    ("family", "sizes", "layer"),
    [
        # q, k, v, o and three of the feed-forward
        ("llama", {"hidden_size": 32, "intermediate_size": 48}, 32 * (32 + 2 * 16 + 32) + 3 * 32 * 48),
        # heads of 16: queries are twice as wide as the states
        ("qwen3", {"hidden_size": 32, "intermediate_size": 80}, 32 * (64 + 2 * 32 + 64) + 3 * 32 * 80),
        # two of four experts of 16, and the router
        ("qwen3_moe", {"hidden_size": 32}, 32 * (32 + 2 * 16 + 32) + 2 * 3 * 32 * 16 + 32 * 4),
    ],
)
def test_the_formula_is_a_count_by_hand_to_a_hundredth(
    tiny_model: Build, family: str, sizes: dict[str, int], layer: int
) -> None:
    model = tiny_model(family, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, **sizes)
    config, tokens = model.config, 24
    products = 6 * (3 * layer + config.vocab_size * 32) * tokens
    # of each layer scores and their sum of values, forward and twice backward, of the half that causality leaves
    attention = 3 * 3 * 2 * 2 * tokens * (tokens / 2) * 4 * (config.head_dim or 8)
    assert counted(model).of(tokens) == pytest.approx(products + attention, rel=0.01)


def test_frozen_matrices_have_no_gradient_of_their_own(tiny_model: Build) -> None:
    model = tiny_model("llama")
    trained = counted(model).per_token
    model.requires_grad_(False)
    assert counted(model).per_token == pytest.approx(trained * 4 / 6)


def test_vectors_count_nothing_and_a_model_may_have_no_output_matrix(tiny_model: Build) -> None:
    model = tiny_model("llama")
    layers = model.get_decoder().layers
    matrices = sum(each.numel() for each in layers.parameters() if each.ndim == 2)
    assert training_flops(layers, None, model.config).per_token == 6 * matrices
