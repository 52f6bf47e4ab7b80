"""How adapters are put around a model and foretold, with a double of peft."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key
from rft_models.keyed_masks.keyed_dropout import KeyedDropout
from rft_models.layers.fast_linear import FastLinear
from rft_models.lora import adapters
from rft_models.lora.adapters import AdapterRules, add_lora, preview


class Around(nn.Module):
    """peft's layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        self.lora_magnitude_vector = nn.ModuleDict()
        self.lora_dropout: Any = {"default": nn.Identity()}
        self.scaling = {"default": 1.5}


class Peft:
    """Notes the configuration, draws and warns as peft does, and changes the model."""

    def __init__(self) -> None:
        self.configured: dict[str, Any] = {}

    def LoraConfig(self, **given: Any) -> str:
        self.configured = given
        return "config"

    def inject_adapter_in_model(self, config: str, model: Any, *, adapter_name: str) -> None:
        assert (config, adapter_name) == ("config", "default")
        torch.rand(3)
        warnings.warn("matrices are transposed", stacklevel=1)
        for name in ("up", "down"):
            setattr(model.inner, name, Around(getattr(model.inner, name)))


class Inner(nn.Module):
    """Two matrices and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return position_ids


class Model(nn.Module):
    """A decoder and an output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(4, 9, bias=False)

    def get_decoder(self) -> Inner:
        return self.inner

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> Peft:
    made = Peft()
    monkeypatch.setattr(adapters, "load_peft", lambda: made)
    return made


@pytest.mark.parametrize(
    ("kind", "rslora", "dora"), [("lora", False, False), ("rslora", True, False), ("dora", False, True)]
)
def test_peft_is_configured_as_the_rules_say(kind: Any, rslora: bool, dora: bool, peft: Peft) -> None:
    found = add_lora(Model(), AdapterRules(2, 3.0, targets=("up", "down"), kind=kind), seed=1, where="base")
    assert peft.configured == {
        "r": 2,
        "lora_alpha": 3.0,
        "lora_dropout": 0.0,
        "target_modules": ["down", "up"],
        "use_rslora": rslora,
        "use_dora": dora,
        "bias": "none",
        "base_model_name_or_path": "base",
    }
    assert found.config == "config"


def test_adapters_alone_are_trained_and_each_begins_from_its_own_key(
    peft: Peft, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked, files = Model(), list[tuple[Any, ...]](), object()

    def initialize(name: str, module: Any, key: int, given: Any) -> dict[str, Tensor]:
        assert not any(parameter.requires_grad for parameter in module.base_layer.parameters())
        asked.append((name, module, key, given))
        return {f"{name}.waits": torch.ones(1)}

    def fingerprint(named: Any, given: Any) -> str:
        assert [name for name, _ in named] == names, "those of the model without adapters"
        return "print" if given is files else ""

    names = [name for name, _ in model.named_parameters()]
    monkeypatch.setattr(adapters, "initialize", initialize)
    monkeypatch.setattr(adapters, "fingerprint", fingerprint)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = add_lora(model, AdapterRules(2), seed=7, where="base", files=files)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert asked == [
        (name, model.get_submodule(name), derive_key(7, f"adapter:{name}"), files)
        for name in ("inner.up", "inner.down")
    ]
    assert found.layers == ["inner.up", "inner.down"]
    assert list(found.waiting) == ["inner.up.waits", "inner.down.waits"]
    assert (found.base_fingerprint, found.rules) == ("print", AdapterRules(2))
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if "lora" not in name)
    assert type(model.inner.up.lora_A["default"]) is FastLinear  # type: ignore[union-attr,index]
    found.begin_update(3)


def test_dropout_is_keyed_by_the_layer_and_by_the_rows_that_the_decoder_is_given(peft: Peft) -> None:
    model = Model()
    found = add_lora(model, AdapterRules(2, dropout=0.5), seed=7, where="base")
    assert peft.configured["lora_dropout"] == 0.5
    drops: list[Any] = [model.inner.up.lora_dropout["default"], model.inner.down.lora_dropout["default"]]  # type: ignore[index,union-attr]
    assert all(isinstance(drop, KeyedDropout) and drop.p == 0.5 for drop in drops)
    ids = torch.arange(40)[None]
    masks: list[Tensor] = []
    for update in (0, 1):
        found.begin_update(update)
        model.inner(input_ids=ids, position_ids=ids)
        masks += [drop(torch.ones(1, 40, 4)) for drop in drops]
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 4
    model = Model()
    add_lora(model, AdapterRules(2, dropout=0.5), seed=7, where="base")
    model.inner(input_ids=ids, position_ids=ids)
    again: Any = model.inner.up.lora_dropout["default"]  # type: ignore[index,union-attr]
    assert torch.equal(again(torch.ones(1, 40, 4)), masks[0])


@pytest.mark.parametrize(
    ("dropout", "packed", "refused"), [(0.5, False, True), (0.5, True, False), (0.0, False, False)]
)
def test_dropout_needs_rows_that_are_packed(dropout: float, packed: bool, refused: bool, peft: Peft) -> None:
    def add() -> object:
        return add_lora(Model(), AdapterRules(2, dropout=dropout), seed=0, where="base", packed=packed)

    if not refused:
        add()
        return
    with pytest.raises(OptionsError) as caught:
        add()
    assert (caught.value.problem.code, caught.value.problem.where) == ("adapters.dropout_native", "base")


@pytest.mark.parametrize(
    ("rules", "trained", "layers", "ends"),
    [
        (AdapterRules(3, targets=("up",)), 30, 1, "up"),
        (AdapterRules(3), 60, 2, "down, up"),
        (AdapterRules(2, targets=("inner.down",), kind="dora"), 24, 1, "down"),
        (AdapterRules(1, kind="dora"), 30, 2, "down, up"),
    ],
)
def test_the_weights_that_would_be_trained_are_counted(
    rules: AdapterRules, trained: int, layers: int, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"there": Model()}
    monkeypatch.setattr(adapters, "model_without_weights", models.__getitem__)
    first, second = preview("there", rules)
    total = sum(parameter.numel() for parameter in Model().parameters())
    assert f" {trained} weights are trained" in first
    assert f" {total} that are not" in first
    assert second == f"on {layers} layers: {ends}"
