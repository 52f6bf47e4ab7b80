"""Rules of freezing without a model: names, patterns of layers, and gradients that go to rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rft_models.policy.freezing import FreezeReport, FreezeRules, names_of, train_rows


@pytest.mark.parametrize(
    ("text", "prefixes"),
    [("", ()), (" , ", ()), ("a", ("a",)), (" a.b, c ,,d", ("a.b", "c", "d"))],
)
def test_prefixes_are_joined_by_commas(text: str, prefixes: tuple[str, ...]) -> None:
    rules = FreezeRules.of(text)
    assert (rules.prefixes, rules.train_only_tokens_from) == (prefixes, -1)
    assert rules.freezes == bool(prefixes)
    assert rules == FreezeRules(prefixes)


@pytest.mark.parametrize(("first", "freezes"), [(-1, False), (0, True), (1, True)])
def test_rows_from_the_first_on_are_a_rule(first: int, freezes: bool) -> None:
    rules = FreezeRules.of("", first)
    assert rules.train_only_tokens_from == first
    assert rules.freezes == freezes


@pytest.mark.parametrize(
    ("stem", "names"),
    [
        ("visual", ["visual", "model.visual", "model.vision_tower"]),
        ("visual.blocks.0", ["visual.blocks.0", "model.visual.blocks.0"]),
        ("vision_tower", ["vision_tower", "model.vision_tower"]),
        ("multi_modal_projector.linear_1", ["multi_modal_projector.linear_1", "model.multi_modal_projector.linear_1"]),
        ("language_model.layers", ["language_model.layers", "model.language_model.layers"]),
        ("model.visual", ["model.visual"]),
        ("visuals", ["visuals"]),
        ("lm_head", ["lm_head"]),
    ],
)
def test_parts_of_models_with_images_may_be_named_without_their_beginning(stem: str, names: list[str]) -> None:
    assert names_of(stem) == names


def test_weights_are_listed_by_names_that_cover_layers() -> None:
    tensors = {
        "model.embed.weight": 7,
        "model.layers.0.up.weight": 1,
        "model.layers.10.up.weight": 2,
        "model.layers.2.up.weight": 4,
        "model.layers.1.up.weight": 8,
        "model.layers.5.up.weight": 16,
        "model.layers.6.up.weight": 32,
        "model.layers.3.experts.4.w": 64,
        "model.layers.4.experts.4.w": 128,
        "model.layers.4.experts.5.w": 256,
        "model.layers.9.down.weight": 512,
        "head.0": 1024,
        "1.head": 2048,
    }
    assert FreezeReport(tensors, {}, 0, 0, ()).tensors_by_pattern() == {
        "model.embed.weight": 7,
        "model.layers.[0-2,5-6,10].up.weight": 63,
        "model.layers.[3-4].experts.4.w": 192,
        "model.layers.4.experts.5.w": 256,
        "model.layers.9.down.weight": 512,
        "head.0": 1024,
        "1.head": 2048,
    }


def test_the_gradient_of_a_matrix_is_summed_in_its_trained_rows_and_nowhere_else() -> None:
    matrix = nn.Parameter(torch.arange(8.0).view(4, 2), requires_grad=False)
    rows = train_rows("m", matrix, 3)
    assert (rows.name, rows.first) == ("m[3:]", 3)
    part = rows.parameter
    assert part.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
    assert part.tolist() == [[6.0, 7.0]]
    assert matrix.requires_grad
    for step in (1.0, 2.0):
        (matrix * step).sum().backward()
        assert matrix.grad is None
    assert part.grad is not None
    assert part.grad.tolist() == [[3.0, 3.0]]
    assert part.grad.untyped_storage().nbytes() == 8, "no memory for the other rows"
    part.grad = None
    matrix.square().sum().backward()
    assert part.grad is not None
    assert part.grad.tolist() == [[12.0, 14.0]]
