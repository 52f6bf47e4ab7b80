"""Names of the layers that adapters go around, and names that may have been meant."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers.pytorch_utils import Conv1D

from rft_core.errors import OptionsError
from rft_models.lora.targets import ends_with, linear_layers, near_names, target_modules

LAYERS = ["layers.0.attn.q_proj", "layers.0.mlp.up", "layers.1.attn.q_proj", "layers.1.mlp.up"]
MODULES = ["", "embed", "layers.0", "layers.0.attn", "layers.0.mlp", *LAYERS]


class Model(nn.Module):
    """Two matrices, one of them transposed, and an output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), Conv1D(2, 2))
        self.head = nn.Linear(2, 3)


class WithHead(Model):
    """The same as a causal language model."""

    def get_output_embeddings(self) -> Any:
        return self.head


def test_linear_layers_but_the_output_matrix_can_have_an_adapter() -> None:
    assert linear_layers(WithHead()) == ["inner.0", "inner.2"]
    assert linear_layers(Model()) == ["inner.0", "inner.2", "head"]


@pytest.mark.parametrize("asked", [(), ("all-linear",), ["all-linear"]])
def test_all_linear_layers_are_named_by_their_ends_where_no_other_module_has_these(asked: Any) -> None:
    assert target_modules(LAYERS, asked, MODULES, "here") == ["q_proj", "up"]
    shared = [*MODULES, "layers.0.norm.up"]
    assert target_modules(LAYERS, asked, shared, "here") == LAYERS
    assert target_modules([], asked, MODULES, "here") == []


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (("up", "q_proj", "up"), ["q_proj", "up"]),
        (("mlp.up",), ["mlp.up"]),
        (("layers.1.mlp.up",), ["layers.1.mlp.up"]),
    ],
)
def test_ends_that_match_are_kept_once_and_sorted(asked: tuple[str, ...], found: list[str]) -> None:
    assert target_modules(LAYERS, asked, MODULES, "here") == found


@pytest.mark.parametrize(
    ("end", "remedy"), [("q_prj", "q_proj"), ("attn", "q_proj"), ("proj", "q_proj"), ("embed", "q_proj")]
)
def test_an_end_of_anything_else_is_refused_with_a_layer_that_is_like_it(end: str, remedy: str) -> None:
    with pytest.raises(OptionsError) as caught:
        target_modules(LAYERS, ("up", end), MODULES, "here")
    problem = caught.value.problem
    assert (problem.code, problem.where) == ("adapters.no_such_layer", "here")
    assert problem.do == f"--target_modules {remedy}"


def test_a_model_without_linear_layers_is_refused_too() -> None:
    with pytest.raises(OptionsError) as caught:
        target_modules([], ("up",), MODULES, "here")
    assert caught.value.problem.do == "--target_modules all-linear"


def test_an_end_begins_at_a_dot() -> None:
    assert ends_with("a.q_proj", "q_proj")
    assert ends_with("q_proj", "q_proj")
    assert not ends_with("a.kq_proj", "q_proj")
    assert not ends_with("a.q_proj.b", "q_proj")


def test_names_alike_come_first_then_those_of_layers_that_contain_it_then_the_rest() -> None:
    layers = [f"layers.0.mixer.{name}" for name in ("zeta", "gate_proj", "down_proj", "up_proj", "alpha", "beta")]
    assert near_names("gate_prj", layers)[0] == "gate_proj"
    assert near_names("mixer.gate_prj", layers)[0] == "gate_proj"
    assert near_names("mixer", layers) == ["zeta", "gate_proj", "down_proj", "up_proj"]
    assert near_names("qqqq", layers) == ["alpha", "beta", "down_proj", "gate_proj"]
    assert near_names("zet", layers) == ["zeta", "beta", "alpha", "down_proj"]
