"""Adapters of doubles of peft's layers: names, numbers, switches, and rules of configurations."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import DataError, PreflightError
from rft_models.keyed_masks.keyed_dropout import RowKeys
from rft_models.lora.adapters import AdapterRules, Adapters, BaseModelView, load_peft, rules_of_config


class Length(nn.Module):
    """DoRA's lengths of a layer's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))


class Adapted(nn.Module):
    """A linear layer 4 to 3 with an adapter of rank 2."""

    def __init__(self, *, length: bool = False, bias: bool = True, transposed: bool = False) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 3, bias=bias)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3, bias=False)})
        self.lora_magnitude_vector = nn.ModuleDict({"default": Length()} if length else {})
        self.scaling = {"default": 0.5}
        self._disable_adapters = False
        if transposed:
            self.fan_in_fan_out = True
            self.base_layer.weight = nn.Parameter(torch.ones(4, 3))


class Model(nn.Module):
    """Three layers with adapters, one without, and a matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.d = Adapted(), Adapted(length=True, bias=False)
        self.t, self.norm, self.twin = Adapted(transposed=True), nn.LayerNorm(2), nn.LayerNorm(2)
        self.twin.weight = self.norm.weight


def made(rows: RowKeys | None = None) -> tuple[Adapters, Model]:
    torch.manual_seed(0)
    model = Model()
    return Adapters(model, AdapterRules(2), "config", "print", rows), model


OWN = [
    "q.lora_A.default.weight",
    "q.lora_B.default.weight",
    "d.lora_A.default.weight",
    "d.lora_B.default.weight",
    "d.lora_magnitude_vector.default.weight",
    "t.lora_A.default.weight",
    "t.lora_B.default.weight",
]


def test_parameters_are_those_of_adapters_or_of_the_model_under_its_own_names() -> None:
    adapters, model = made()
    assert adapters.layers == ["q", "d", "t"]
    assert [name for name, _ in adapters.named_parameters()] == OWN
    assert adapters.num_parameters == 3 * (2 * 4 + 3 * 2) + 3
    base = ["q.weight", "q.bias", "d.weight", "t.weight", "t.bias", "norm.weight", "norm.bias", "twin.bias"]
    assert [name for name, _ in adapters.base_parameters()] == base
    base.insert(-1, "twin.weight")
    assert [name for name, _ in adapters.base_parameters(remove_duplicate=False)] == base
    assert dict(adapters.base_parameters())["q.weight"] is model.q.base_layer.weight
    assert adapters.waiting == {}
    waiting: dict[str, Tensor] = {}
    assert Adapters(model, AdapterRules(2), None, "print", None, waiting).waiting is waiting
    assert (adapters.config, adapters.base_fingerprint) == ("config", "print")


def test_tensors_have_the_names_of_pefts_files() -> None:
    adapters, model = made()
    found = adapters.tensors(model.named_parameters())
    parts = [name.removesuffix(".default.weight").replace(".default", "") for name in OWN]
    assert list(found) == [f"base_model.model.{part}" + ("" if "magnitude" in part else ".weight") for part in parts]


def test_merged_tensors_have_the_adapters_folded_in() -> None:
    adapters, model = made()
    found = dict(adapters.merged(model.named_parameters()))
    assert list(found) == [
        "q.bias", "q.weight", "d.weight", "t.bias", "t.weight", "norm.weight", "norm.bias", "twin.bias"
    ]  # fmt: skip
    q, t = model.q, model.t
    update = 0.5 * q.lora_B["default"].weight @ q.lora_A["default"].weight  # type: ignore[operator]
    torch.testing.assert_close(found["q.weight"], (q.base_layer.weight + update).detach())
    update = 0.5 * t.lora_B["default"].weight @ t.lora_A["default"].weight  # type: ignore[operator]
    torch.testing.assert_close(found["t.weight"], (t.base_layer.weight + update.T).detach())
    assert float(found["d.weight"].norm(dim=1).sub(2.0).abs().max()) < 1e-5
    assert not any(tensor.requires_grad for tensor in found.values())


def test_lengths_of_rows_read_the_matrix_under_them_its_bias_and_the_first_factor() -> None:
    adapters, model = made()
    [(reader, read)] = adapters.cross_module_reads()
    d = model.d
    assert reader is d.lora_magnitude_vector["default"]
    assert [id(one) for one in read] == [id(d.base_layer.weight), id(d.lora_A["default"].weight)]
    d.base_layer.bias = nn.Parameter(torch.zeros(3))
    [(_, read)] = adapters.cross_module_reads()
    assert [id(one) for one in read] == [
        id(d.base_layer.weight), id(d.base_layer.bias), id(d.lora_A["default"].weight)
    ]  # fmt: skip


def switches(model: Model) -> list[bool]:
    return [model.q._disable_adapters, model.d._disable_adapters, model.t._disable_adapters]


def test_adapters_are_off_within_a_block_also_where_it_fails() -> None:
    adapters, model = made()

    def fail() -> None:
        with adapters.disabled():
            assert switches(model) == [True] * 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert switches(model) == [False] * 3
    policy = SimpleNamespace(adapters=adapters)

    def token_logprobs(tokens: Any, **options: Any) -> Any:
        assert not torch.is_grad_enabled()
        return tokens, options, switches(model)

    policy.token_logprobs = token_logprobs
    view: Any = BaseModelView(policy)
    assert view.token_logprobs("tokens", temperature=2.0) == ("tokens", {"temperature": 2.0}, [True] * 3)
    assert switches(model) == [False] * 3


def test_masks_follow_the_number_of_the_update_where_there_is_dropout() -> None:
    rows = RowKeys()
    made(rows)[0].begin_update(5)
    assert rows.update == 5
    made()[0].begin_update(5)


@pytest.mark.parametrize(("kind", "scale"), [("lora", 1.25), ("dora", 1.25), ("rslora", 2.5)])
def test_the_scale_of_an_update_is_alpha_over_the_rank_or_its_root(kind: Any, scale: float) -> None:
    assert AdapterRules(4, 5.0, kind=kind).scale == scale


def test_rules_of_settings_are_none_without_a_rank() -> None:
    assert AdapterRules.of(0, 5.0, 0.0, "q", "lora") is None
    found = AdapterRules.of(3, 5.0, 0.25, " q , v,,", "dora")
    assert found == AdapterRules(rank=3, alpha=5.0, dropout=0.25, targets=("q", "v"), kind="dora")
    assert AdapterRules(1) == AdapterRules(1, 16.0, 0.0, ("all-linear",), "lora")


GIVEN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q", "v"]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, AdapterRules(4, 8.0, 0.0, ("q", "v"), "lora")),
        ({"use_rslora": True}, AdapterRules(4, 8.0, 0.0, ("q", "v"), "rslora")),
        ({"use_dora": True, "lora_dropout": 0.5}, AdapterRules(4, 8.0, 0.0, ("q", "v"), "dora")),
        ({"target_modules": "all-linear", "bias": "none"}, AdapterRules(4, 8.0, 0.0, ("all-linear",), "lora")),
        ({"rank_pattern": {}, "modules_to_save": None}, AdapterRules(4, 8.0, 0.0, ("q", "v"), "lora")),
    ],
)
def test_rules_are_read_from_pefts_configuration(changes: dict[str, Any], expected: AdapterRules) -> None:
    assert rules_of_config(GIVEN | changes, "here") == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "IA3"},
        {"peft_type": None},
        {"bias": "all"},
        {"target_modules": []},
        {"rank_pattern": {"q": 2}},
        {"alpha_pattern": {"q": 2}},
        {"modules_to_save": ["head"]},
        {"layers_to_transform": [1]},
        {"target_parameters": ["w"]},
        {"lora_bias": True},
    ],
)
def test_adapters_of_another_kind_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        rules_of_config(GIVEN | changes, "here")
    assert (caught.value.problem.code, caught.value.problem.where) == ("adapters.unknown_kind", "here")
    assert next(iter(changes)) in caught.value.problem.what


def test_peft_is_named_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_peft().__name__ == "peft"
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PreflightError) as caught:
        load_peft()
    assert caught.value.problem.code == "adapters.no_peft"
