"""Tensors of a checkpoint found among the parameters of an engine that fuses some of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_engine.weight_sync.fingerprints import element_digest
from rft_engine.weight_sync.fused_parameters import find_parameters, held_fingerprint

SHAPES = {
    "layer.q.weight": (4, 3),
    "layer.k.weight": (2, 3),
    "layer.v.weight": (2, 3),
    "embed.weight": (5, 3),
    "norm.weight": (3,),
    "layer.up.weight": (6, 3),
}
FUSIONS = {"qkv": ["q", "k", "v"], "gate_up": ["gate", "up"]}


def model(**parameters: Tensor) -> Any:
    named = {name.replace("__", "."): tensor for name, tensor in parameters.items()}
    return SimpleNamespace(named_parameters=lambda: named.items(), packed_modules_mapping=FUSIONS)


QKV = torch.arange(24.0).view(8, 3)


@pytest.mark.parametrize(("part", "rows"), [("q", slice(0, 4)), ("k", slice(4, 6)), ("v", slice(6, 8))])
def test_a_part_has_its_rows_of_the_fused_matrix(part: str, rows: slice) -> None:
    fused = model(layer__qkv__weight=QKV.requires_grad_())
    found = find_parameters(fused, SHAPES).get(f"layer.{part}.weight")
    assert found is not None
    assert torch.equal(found, QKV[rows])
    assert not found.requires_grad
    given = find_parameters(model(layer__all__weight=QKV), SHAPES, {"all": ["q", "k", "v"]}).get(f"layer.{part}.weight")
    assert given is not None
    assert torch.equal(given, QKV[rows])


def test_a_matrix_that_is_cut_or_lacks_a_part_is_not_looked_into() -> None:
    cut = model(layer__qkv__weight=QKV[:7])
    assert find_parameters(cut, SHAPES).get("layer.q.weight") is None
    padded = find_parameters(model(layer__qkv__weight=torch.cat([QKV, QKV])), SHAPES).get("layer.v.weight")
    assert padded is not None
    assert torch.equal(padded, QKV[6:8])
    assert find_parameters(model(layer__gate_up__weight=QKV), SHAPES).get("layer.up.weight") is None, (
        "gate is not there"
    )
    assert find_parameters(model(layer__qkv__weight=torch.tensor(1.0)), SHAPES).get("layer.q.weight") is None
    assert find_parameters(model(), SHAPES).get("layer.q.weight") is None
    assert find_parameters(SimpleNamespace(named_parameters=lambda: ()), SHAPES).get("layer.q.weight") is None


@pytest.mark.parametrize(
    ("shape", "found"), [((5, 3), True), ((8, 3), True), ((4, 3), False), ((5, 4), False), ((15,), False), ((), False)]
)
def test_a_parameter_of_the_same_name_may_have_more_rows_and_nothing_else(shape: tuple[int, ...], found: bool) -> None:
    tensor = torch.ones(shape)
    rows = find_parameters(model(embed__weight=tensor), SHAPES).get("embed.weight")
    assert (rows is not None) == found
    if rows is not None:
        assert rows.shape == (5, 3)


def test_digests_are_of_what_is_held_in_the_engine_s_type() -> None:
    embedding, norm = torch.randn(6, 3), torch.ones(3, dtype=torch.bfloat16)
    held = model(
        embed__weight=embedding, norm__weight=norm, layer__qkv__weight=QKV.to(torch.int8), layer__up__weight=None
    )
    held.named_parameters = lambda: {
        "embed.weight": embedding,
        "norm.weight": norm,
        "layer.q.weight": torch.zeros(4, 3, dtype=torch.int32),
        "layer.k.weight": torch.zeros(2, 3).to(torch.float8_e4m3fn),
    }.items()
    found = held_fingerprint(held, SHAPES, torch.bfloat16)
    assert list(found) == ["embed.weight", "norm.weight"]
    assert found["embed.weight"] == element_digest(embedding[:5], (5, 3), torch.bfloat16)
    assert found["embed.weight"] != element_digest(embedding[:5], (5, 3), torch.float32)
    fused = held_fingerprint(model(layer__all__weight=QKV), SHAPES, torch.float32, {"all": ["q", "k", "v"]})
    assert list(fused) == ["layer.q.weight", "layer.k.weight", "layer.v.weight"]


def test_parameters_are_listed_once_whatever_the_number_of_tensors() -> None:
    tensors = {f"layer{number}.weight": torch.zeros(1, 1) for number in range(50)}
    lists: list[int] = []
    held: Any = SimpleNamespace(named_parameters=lambda: lists.append(len(lists)) or tensors.items())
    assert len(held_fingerprint(held, {name: (1, 1) for name in tensors}, torch.float32)) == 50
    assert lists == [0]


def test_a_number_of_the_checkpoint_is_not_looked_for_in_a_list_of_numbers() -> None:
    assert find_parameters(model(scale=torch.ones(3)), {"scale": ()}) == {}
