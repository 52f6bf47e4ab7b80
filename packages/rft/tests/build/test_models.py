"""Models from settings: the user's code runs before the tokenizer is read, and a preview loads no weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from rft.build import models
from rft_core.errors import OptionsError
from rft_dist.settings import AdamSettings
from rft_models.policy import freezing
from rft_models.settings import ModelSettings


def test_the_code_of_a_model_runs_before_its_tokenizer_is_read(calls: Any) -> None:
    calls.put(models, "load_model_code load_processor")
    assert models.tokenizer_of(calls.double("settings")) == "load_processor()"
    assert calls.taken() == ["load_model_code(settings.model_code)", "load_processor(settings.pretrain)"]


@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.parametrize("loss", [0.0, 0.5])
@pytest.mark.parametrize("bf16", [True, False])
def test_a_preview_reads_what_the_settings_ask_for(calls: Any, freezes: bool, loss: float, bf16: bool) -> None:
    calls.put(
        models,
        "model_facts checkpointing_of describe_attention preview router_facts",
        freezing_of=calls.double("rules", freezes=freezes),
    )
    settings = calls.double("settings", bf16=bf16, aux_loss_coef=loss)
    found = models.preview_model(settings, "meta")
    assert (found.attention, found.checkpointing) == ("describe_attention()", "checkpointing_of()")
    assert found.frozen == ("preview()" if freezes else None)
    assert found.router == ("router_facts()" if loss else None)
    made = [
        "model_facts(settings.pretrain)",
        "freezing_of(settings)",
        f"describe_attention(model_facts().model_type, 'meta', torch.{'bfloat16' if bf16 else 'float32'}, "
        "flash_attn=settings.flash_attn, text_type=model_facts().text_type)",
        "checkpointing_of(settings)",
    ]
    if freezes:
        made.append("preview(settings.pretrain, rules)")
    if loss:
        made.append("router_facts(settings.pretrain)")
    assert calls.taken() == made


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(directory: str) -> nn.Module:
        assert directory == "m"
        return nn.ModuleDict({"layers": nn.Linear(2, 2), "table": nn.Embedding(2, 2)})

    monkeypatch.setattr(freezing, "model_without_weights", model)


@pytest.mark.usefixtures("named")
def test_parts_with_a_rate_or_a_decay_of_their_own_are_listed() -> None:
    adam = AdamSettings(lr_factors="layers=0.5,score.weight=2", l2_factors="table=1")
    assert models.preview_groups(ModelSettings(pretrain="m"), adam, "score.weight") == [
        "layers: 0.5 x the learning rate (2 of 4 tensors)",
        "score.weight: 2 x the learning rate (1 of 4 tensors)",
        "table: 1 x the weight decay (1 of 4 tensors)",
    ]
    assert models.preview_groups(ModelSettings(pretrain="m"), AdamSettings()) == []


@pytest.mark.usefixtures("named")
def test_a_part_that_the_model_does_not_have_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(OptionsError) as caught:
        models.preview_groups(ModelSettings(pretrain="m"), AdamSettings(lr_factors="score.weight=2"))
    assert caught.value.problem.code == "optimizer.no_such_parameter"


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("setting", ["lr_factors", "l2_factors"])
def test_a_part_that_is_frozen_is_refused_before_it_is_loaded_as_at_the_start(calls: Any, setting: str) -> None:
    frozen, table = ModelSettings(pretrain="m", freeze_prefix="table"), replace(AdamSettings(), **{setting: "table=2"})
    with pytest.raises(OptionsError) as caught:
        models.preview_groups(frozen, table)
    trained = [("layers.weight", None), ("layers.bias", None)]
    with pytest.raises(OptionsError) as at_the_start:
        models.refuse_unknown_parts(calls.double("policy", trainable_parameters=lambda: trained), table)
    assert caught.value.problem == at_the_start.value.problem
    layers = AdamSettings(lr_factors="layers=0.5")
    assert models.preview_groups(frozen, layers) == ["layers: 0.5 x the learning rate (2 of 2 tensors)"]


def test_a_part_that_is_not_trained_is_refused_once_the_model_is_there(calls: Any) -> None:
    policy = calls.double("policy", trainable_parameters=lambda: [("layers.weight", None)])
    adam = AdamSettings(lr_factors="layers=0.5,score.weight=2")
    models.refuse_unknown_parts(policy, adam, "score.weight")
    with pytest.raises(OptionsError):
        models.refuse_unknown_parts(policy, adam)
